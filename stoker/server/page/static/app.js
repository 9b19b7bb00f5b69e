// The page's start: models, dialogs, the live panel, and what the reader is told about the connection.

import { models } from "./api.js";
import { open, openChat, showContext, showPlace, startChat, suggest } from "./chat.js";
import { chooseModel, reconnect, startLive } from "./live.js";
import { element } from "./message.js";
import { keep, kept, openSettings, watchSettings } from "./settings.js";
import { startTheme } from "./theme.js";
import { Chat, list, load, remove } from "./tree.js";
import { count } from "./words.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = ["Explain in three sentences why the sky is blue.", "Write a haiku about a stoker on a steam train.", "What is the difference between a virus and a bacterium?"];

let known = [];

function model() {
  const found = known.find((entry) => entry.id === $("model").value);
  return { id: found?.id || $("model").value, contextTokens: found?.context_length };
}

async function loadModels() {
  try {
    known = await models();
  } catch (error) {
    tell("off", error);
    return;
  }
  const select = $("model"), wanted = kept("model");
  select.replaceChildren(...known.map((entry) => new Option(entry.id, entry.id)));
  if (known.some((entry) => entry.id === wanted)) select.value = wanted;
  select.disabled = known.length < 2;
  chooseModel(select.value);
  showContext();
}

let state = "";

// The word at the top, and the banner where something is to be done.
function tell(now, error) {
  const shown = now === "on" ? "on" : error?.kind === "key" ? "key" : "off";
  const full = shown + (error?.sentKey ? " wrong" : "");
  if (full === state) return;
  const back = state !== "" && shown === "on";
  state = full;
  $("link").dataset.state = shown;
  $("link").lastElementChild.textContent = { on: "connected", off: "no connection", key: "needs a key" }[shown];
  const banner = $("banner");
  banner.replaceChildren();
  banner.hidden = shown === "on";
  if (shown === "off") banner.append("The server does not answer. Trying again; your chats are kept in this browser.");
  if (shown === "key") {
    const button = element("button", "", "Enter the key");
    button.type = "button";
    button.addEventListener("click", () => openSettings("key"));
    banner.append(error.sentKey ? "The API key is wrong. " : "The server wants an API key. ", button);
  }
  if (shown === "on" && (back || known.length === 0)) loadModels();
}

function showChats() {
  const rows = list().map((entry) => {
    const row = element("li"), go = element("button", "plain go"), away = element("button", "plain danger", "Delete");
    go.type = away.type = "button";
    go.append(element("span", "", entry.title || "New chat"), element("small", "", new Date(entry.changed).toLocaleString()));
    if (entry.id === openChat().id) go.setAttribute("aria-current", "true");
    go.addEventListener("click", () => {
      $("chats").close();
      open(load(entry.id) || new Chat());
    });
    away.setAttribute("aria-label", `Delete: ${entry.title}`);
    away.addEventListener("click", () => {
      remove(entry.id);
      if (entry.id === openChat().id) open(new Chat());
      showChats();
      $("chats-list").querySelector("button")?.focus();
    });
    row.append(go, away);
    return row;
  });
  $("chats-list").replaceChildren(...(rows.length ? rows : [element("li", "soft", "No chat yet.")]));
  $("export").disabled = openChat().empty;
  $("clear").disabled = rows.length === 0;
}

function exportChat() {
  const chat = openChat(), link = element("a");
  link.href = URL.createObjectURL(new Blob([chat.markdown()], { type: "text/markdown" }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A second press deletes: nothing is lost by one slip.
function clearChats() {
  const button = $("clear");
  if (!button.dataset.sure) {
    button.dataset.sure = "yes";
    button.textContent = "Really delete all?";
    setTimeout(() => {
      delete button.dataset.sure;
      button.textContent = "Delete all chats";
    }, 4000);
    return;
  }
  for (const entry of list()) remove(entry.id);
  open(new Chat());
  $("chats").close();
}

function toggleLive(shown) {
  document.body.classList.toggle("show-live", shown);
  $("live-open").setAttribute("aria-expanded", String(shown));
  if (shown) $("live-close").focus();
  else $("live-open").focus();
}

function start() {
  startTheme();
  startChat(model);
  watchSettings((keyChanged) => {
    if (!keyChanged) return;
    loadModels();
    reconnect();
  });
  $("model").addEventListener("change", () => {
    keep("model", $("model").value);
    chooseModel($("model").value);
    showContext();
  });
  $("settings-open").addEventListener("click", () => openSettings());
  $("chats-open").addEventListener("click", () => {
    showChats();
    $("chats").showModal();
  });
  for (const button of document.querySelectorAll("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close(""));
  $("new").addEventListener("click", () => open(new Chat()));
  $("export").addEventListener("click", exportChat);
  $("clear").addEventListener("click", clearChats);
  $("live-open").addEventListener("click", () => toggleLive(!document.body.classList.contains("show-live")));
  $("live-close").addEventListener("click", () => toggleLive(false));
  $("live").addEventListener("keydown", (event) => event.key === "Escape" && document.body.classList.contains("show-live") && toggleLive(false));
  $("examples").replaceChildren(...EXAMPLES.map((text) => {
    const row = element("li"), button = element("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => suggest(text));
    row.append(button);
    return row;
  }));
  startLive(tell, (sample) => {
    showPlace(sample);
    const shown = sample.models[model().id];
    if (shown?.loaded) $("empty-about").textContent = `It runs on this machine, ${shown.heat.layers} layers of ${count(shown.heat.experts)} experts; what you write stays here.`;
  });
  loadModels();
}

start();
