// The settings dialog and what it keeps: system prompt and sampling in localStorage, the key in this tab alone.

import { getKey, setKey } from "./api.js";

const KEPT = "stoker.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const dialog = document.getElementById("settings");
const field = (name) => document.getElementById(name);

let settings = read();

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) || {};
  } catch {
    return {};
  }
}

// The fields of a request that were set; an empty one is left out.
export function sampling() {
  return Object.fromEntries(NUMBERS.filter((name) => settings[name] != null).map((name) => [name, settings[name]]));
}

export function systemPrompt() {
  return (settings.system || "").trim();
}

export function kept(name) {
  return settings[name];
}

export function keep(name, value) {
  settings[name] = value;
  try {
    localStorage.setItem(KEPT, JSON.stringify(settings));
  } catch {
    // No room or not allowed: the choice holds until the page is left.
  }
}

export function openSettings(focus = "system") {
  for (const name of NUMBERS) field(name).value = settings[name] ?? "";
  field("system").value = settings.system || "";
  field("key").value = getKey();
  field("settings-wrong").textContent = "";
  dialog.returnValue = "";
  dialog.showModal();
  field(focus).focus();
}

// `changed(keyChanged)` after the dialog was closed with new values.
export function watchSettings(changed) {
  dialog.querySelector("form").addEventListener("submit", (event) => {
    const wrong = NUMBERS.map(field).find((input) => !input.checkValidity());
    if (wrong) {
      event.preventDefault();
      field("settings-wrong").textContent = `${wrong.closest("label").firstChild.textContent.trim()}: ${wrong.validationMessage}`;
      wrong.focus();
    }
  });
  dialog.querySelector("form").noValidate = true;
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "save") return;
    for (const name of NUMBERS) keep(name, field(name).value === "" ? null : Number(field(name).value));
    keep("system", field("system").value);
    const before = getKey();
    setKey(field("key").value);
    changed(before !== getKey());
  });
  dialog.addEventListener("cancel", () => (dialog.returnValue = ""));
  field("settings-reset").addEventListener("click", () => {
    for (const name of [...NUMBERS, "system"]) field(name).value = "";
    field("system").focus();
  });
}
