// Conversations as trees: an edit or a retry adds a branch beside the old one, nothing is lost. Kept in localStorage.
// Knows no document and no network.

const PREFIX = "stoker.chat.";
const LIST = "stoker.chats";

export class Chat {
  constructor(data = {}) {
    this.id = data.id || newId();
    this.changed = data.changed || Date.now();
    this.nodes = data.nodes || { root: { id: "root", children: [], chosen: 0 } };
  }

  get empty() {
    return this.nodes.root.children.length === 0;
  }

  get title() {
    const first = this.path()[0];
    return first ? first.text.trim().replace(/\s+/g, " ").slice(0, 80) : "New chat";
  }

  // The messages that are shown, first to last.
  path() {
    const shown = [];
    let node = this.nodes.root;
    while (node.children.length) {
      node = this.nodes[node.children[node.chosen]];
      shown.push(node);
    }
    return shown;
  }

  add(parentId, fields) {
    const parent = this.nodes[parentId], node = { ...fields, id: newId(), parent: parentId, children: [], chosen: 0 };
    this.nodes[node.id] = node;
    parent.chosen = parent.children.push(node.id) - 1;
    this.changed = Date.now();
    return node;
  }

  // The messages from the first to `id`.
  upTo(id) {
    const above = [];
    for (let node = this.nodes[id]; node && node.id !== "root"; node = this.nodes[node.parent]) above.unshift(node);
    return above;
  }

  // [place among its siblings, how many they are]
  place(node) {
    const siblings = this.nodes[node.parent].children;
    return [siblings.indexOf(node.id), siblings.length];
  }

  turnTo(node, offset) {
    const parent = this.nodes[node.parent], count = parent.children.length;
    parent.chosen = Math.min(count - 1, Math.max(0, parent.children.indexOf(node.id) + offset));
  }

  // False where the browser has no room or does not allow it.
  save() {
    try {
      localStorage.setItem(PREFIX + this.id, JSON.stringify({ id: this.id, changed: this.changed, nodes: this.nodes }));
      const others = list().filter((entry) => entry.id !== this.id);
      localStorage.setItem(LIST, JSON.stringify([{ id: this.id, title: this.title, changed: this.changed }, ...others]));
      return true;
    } catch {
      return false;
    }
  }

  markdown() {
    return this.path().map((node) => `**${node.role === "user" ? "You" : node.model || "Model"}**\n\n${node.text}\n`).join("\n---\n\n");
  }
}

export function list() {
  try {
    return JSON.parse(localStorage.getItem(LIST)) || [];
  } catch {
    return [];
  }
}

export function load(id) {
  try {
    const data = JSON.parse(localStorage.getItem(PREFIX + id));
    return data ? new Chat(data) : null;
  } catch {
    return null;
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
  localStorage.setItem(LIST, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
