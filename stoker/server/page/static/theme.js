// Light, dark, or as the system says: a button that goes round. The choice is kept.

import { keep, kept } from "./settings.js";

const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
const button = document.getElementById("theme");
const listeners = [];

function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme-name").textContent = NAMES[theme];
  button.setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
  button.title = `Theme: ${NAMES[theme]}`;
  for (const listener of listeners) listener();
}

export function onTheme(listener) {
  listeners.push(listener);
}

export function startTheme() {
  apply(kept("theme") || "auto");
  button.addEventListener("click", () => {
    const names = Object.keys(NAMES), next = names[(names.indexOf(kept("theme") || "auto") + 1) % names.length];
    keep("theme", next);
    apply(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((listener) => listener()));
}
