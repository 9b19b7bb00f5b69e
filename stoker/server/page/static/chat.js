// The conversation on the page: sends, streams, stops, edits, retries. One answer is written at a time.
// Owns the open chat; drawing one message is message.js's, the tree is tree.js's, HTTP is api.js's.

import { ApiError, chat as ask } from "./api.js";
import { MessageView, element } from "./message.js";
import { keep, kept, openSettings, sampling, systemPrompt } from "./settings.js";
import { Speaker } from "./speaker.js";
import { Chat, list, load } from "./tree.js";
import { count } from "./words.js";

const $ = (id) => document.getElementById(id);
const messages = $("messages"), scroll = $("scroll"), prompt = $("prompt");
const speaker = new Speaker($("spoken"));

let chat = load(kept("open") || list()[0]?.id) || new Chat();
let views = [], running = null, stick = true, getModel = () => ({});
let unsaved = false;

const on = { edit, retry, turn, key: () => openSettings("key"), settings: () => openSettings("temperature"), new: () => open(new Chat()) };

// `model()`: {id, contextTokens} of the chosen model.
export function startChat(model) {
  getModel = model;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", promptKey);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
    // Who starts to type where nothing is chosen means the message.
    const letter = event.key.length === 1 && event.key !== " " && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (letter && event.target === document.body) prompt.focus();
  });
  scroll.addEventListener("scroll", () => {
    stick = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    $("latest").hidden = stick;
  });
  new ResizeObserver(() => stick && toEnd()).observe(scroll);
  $("latest").addEventListener("click", () => toEnd(true));
  messages.addEventListener("click", copy);
  addEventListener("pagehide", () => running && chat.save());
  draw();
}

export function open(other) {
  stop();
  chat = other;
  keep("open", chat.id);
  draw();
  toEnd(true);
  prompt.focus();
}

export function openChat() {
  return chat;
}

export function suggest(text) {
  prompt.value = text;
  send();
}

function promptKey(event) {
  const touch = matchMedia("(pointer: coarse)").matches;
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !prompt.value && !running) {
    const last = views.findLast((view) => view.node.role === "user");
    if (last) {
      event.preventDefault();
      last.edit();
    }
  }
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  fit();
  const parent = chat.path().at(-1)?.id || "root";
  answer(chat.add(parent, { role: "user", text }));
}

function edit(node, text) {
  if (running) stop();
  const fields = { role: node.role, text: text.trim(), model: node.model };
  const changed = chat.add(node.parent, fields);
  if (node.role === "user") answer(changed);
  else finishChange();
}

function retry(node) {
  if (running) stop();
  const user = node.role === "user" ? node : chat.nodes[node.parent];
  // An attempt that failed before its first word is taken up again; any other stays beside the new one.
  const failed = node.role === "assistant" && node.error && !node.text && !node.reasoning;
  answer(user, failed ? node : null);
}

function turn(node, offset) {
  chat.turnTo(node, offset);
  finishChange();
  const view = views.find((shown) => shown.node.parent === node.parent && shown.node.role === node.role);
  const buttons = view?.acts.querySelectorAll(".turn button") || [];
  const wanted = offset < 0 ? [0, 1] : [1, 0];
  wanted.map((i) => buttons[i]).find((button) => button && !button.disabled)?.focus();
}

function finishChange() {
  save();
  draw();
}

export function stop() {
  running?.abort.abort();
}

async function answer(user, again = null) {
  const { id, contextTokens } = getModel();
  const node = again || chat.add(user.id, { role: "assistant" });
  Object.assign(node, { text: "", reasoning: "", model: id, contextTokens, error: null, progress: null, place: "", usage: null, finish: null });
  const own = { abort: new AbortController(), node, chat, start: performance.now(), first: 0, pieces: 0 };
  running = own;
  save();
  draw();
  toEnd(true);
  busy(true);
  speaker.begin();
  try {
    for await (const chunk of ask(body(id, user), own.abort.signal)) {
      take(own, chunk);
      drawSoon(own);
    }
  } catch (error) {
    if (error.name === "AbortError" || own.abort.signal.aborted) node.finish = "stopped";
    else node.error = { ...(error instanceof ApiError ? error : new ApiError("failed", { detail: String(error.message || error) })) };
  }
  if (own.first && own.pieces > 1) {
    node.ownFirst = (own.first - own.start) / 1000;
    node.ownSpeed = (own.pieces - 1) / ((performance.now() - own.first) / 1000);
  }
  delete node.progress;
  if (running === own) running = null;
  save(own.chat);
  end(own);
}

function end(own) {
  views.find((view) => view.node === own.node)?.update(false);
  if (!running) busy(false);
  if (stick) toEnd();
  showContext();
  speaker.end(own.node.error ? "" : own.node.finish === "stopped" ? "Stopped." : "End of the answer.");
}

function body(model, user) {
  const shown = chat.upTo(user.id).filter((node) => node.role === "user" || node.text);
  const said = shown.map((node) => ({ role: node.role, content: node.text }));
  const system = systemPrompt();
  if (system) said.unshift({ role: "system", content: system });
  return { model, messages: said, stream: true, stream_options: { include_usage: true, include_progress: true }, ...sampling() };
}

function take(own, chunk) {
  const node = own.node, choice = chunk.choices?.[0];
  if (chunk.progress) node.progress = chunk.progress;
  if (chunk.usage) Object.assign(node, { usage: chunk.usage, timings: chunk.stoker?.choices[0]?.timings, stats: chunk.stoker?.choices[0]?.stats });
  if (!choice) return;
  const { content, reasoning_content: reasoning } = choice.delta || {};
  if (content || reasoning) {
    own.first ||= performance.now();
    own.pieces += 1;
  }
  if (reasoning) node.reasoning += reasoning;
  if (content) {
    node.text += content;
    speaker.say(content);
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

let drawing = 0, savedAt = 0;

function drawSoon(own) {
  if (drawing) return;
  // A hidden tab has no frames to wait for.
  const later = document.hidden ? (run) => setTimeout(run, 250) : requestAnimationFrame;
  drawing = later(() => {
    drawing = 0;
    if (running !== own) return;
    views.find((view) => view.node === own.node)?.update(true);
    if (stick) toEnd();
    if (performance.now() - savedAt > 2000) save();
  });
}

function draw() {
  views = chat.path().map((node) => new MessageView(chat, node, on));
  messages.replaceChildren(...views.map((view) => view.element));
  if (running) views.find((view) => view.node === running.node)?.update(true);
  $("empty").hidden = views.length > 0;
  document.title = chat.empty ? "stoker" : `${chat.title.slice(0, 40)} · stoker`;
  showContext();
}

function busy(now) {
  const focused = document.activeElement;
  $("send").hidden = now;
  $("stop").hidden = !now;
  if (now && focused === $("send")) $("stop").focus();
  if (!now && (focused === $("stop") || focused === document.body)) prompt.focus();
}

export function showContext() {
  const used = chat.path().findLast((node) => node.usage)?.usage.total_tokens, { contextTokens } = getModel();
  $("context").textContent = !contextTokens ? "" : used ? `${count(used)} of ${count(contextTokens)} tokens of context` : `${count(contextTokens)} tokens of context`;
}

// The queue as the server tells it, for an answer that has not begun.
export function showPlace(sample) {
  if (!running || running.node.progress || running.node.text || running.node.reasoning) return;
  const waiting = sample.models[running.node.model]?.status?.waiting;
  running.node.place = waiting ? `${count(waiting)} in the queue` : sample.models[running.node.model]?.loaded === false ? "the model is being loaded" : "";
  drawSoon(running);
}

function save(which = chat) {
  if (which.empty) return;
  savedAt = performance.now();
  keep("open", which.id);
  if (!which.save() && !unsaved) {
    unsaved = true;
    const note = element("p", "unsaved", "This browser has no room to keep the chat: export it before you leave.");
    note.setAttribute("role", "status");
    $("composer").append(note);
  }
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function toEnd(force = false) {
  if (force) stick = true;
  scroll.scrollTop = scroll.scrollHeight;
  $("latest").hidden = true;
}

async function copy(event) {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const id = button.closest(".message").dataset.id;
  const text = button.dataset.copy === "code" ? button.closest("figure").querySelector("code").textContent : chat.nodes[id].text;
  const label = button.textContent;
  let done = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyOld(text) ? "Copied" : "Not allowed";
  }
  button.textContent = done;
  setTimeout(() => (button.textContent = label), 1500);
}

// Where the page is not on localhost or HTTPS there is no clipboard API.
function copyOld(text) {
  const area = element("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
