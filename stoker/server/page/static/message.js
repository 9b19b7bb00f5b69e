// One message on the page: its words, reasoning, progress, trouble, figures and buttons.
// Draws what it is given; what the buttons do is the chat's business.

import { Rendered } from "./markdown.js";
import { count, figure, percent, plural, seconds, trouble } from "./words.js";

const LONG = 1500, LONG_LINES = 16; // characters, lines
const BUTTONS = { retry: "Try again", key: "Enter the key", new: "Start a new chat", settings: "Open settings" };

export class MessageView {
  // `on`: {edit, retry, turn, key, new, settings}, called with the node.
  constructor(chat, node, on) {
    this.chat = chat;
    this.node = node;
    this.on = on;
    const own = node.role === "user";
    this.element = element("li", `message ${node.role}`);
    this.element.dataset.id = node.id;
    this.who = this.element.appendChild(element("h2", "who", own ? "You" : node.model || "Model"));
    if (own) this.drawOwn();
    else this.drawAnswer();
    this.acts = this.element.appendChild(element("div", "acts"));
    this.acts.setAttribute("role", "group");
    this.acts.setAttribute("aria-label", own ? "Your message" : "This answer");
    this.update(false);
  }

  // A long message shows its beginning; a button shows the rest.
  drawOwn() {
    const words = this.element.appendChild(element("p", "words", this.node.text));
    if (this.node.text.length < LONG && this.node.text.split("\n").length < LONG_LINES) return;
    const more = this.element.appendChild(element("button", "plain more", "Show all"));
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    words.classList.add("cut");
    more.addEventListener("click", () => {
      const cut = words.classList.toggle("cut");
      more.textContent = cut ? "Show all" : "Show less";
      more.setAttribute("aria-expanded", String(!cut));
    });
  }

  drawAnswer() {
    this.reasoning = this.element.appendChild(element("details", "reasoning"));
    this.summary = this.reasoning.appendChild(element("summary"));
    this.thoughts = new Rendered(this.reasoning.appendChild(element("div", "words")));
    this.reasoning.addEventListener("toggle", () => this.reasoning.open && this.thoughts.show(this.node.reasoning || ""));
    this.answer = new Rendered(this.element.appendChild(element("div", "words")));
    this.progress = this.element.appendChild(element("div", "progress"));
    this.problem = this.element.appendChild(element("div", "problem"));
    this.figures = this.element.appendChild(element("p", "figures"));
  }

  // Show the node as it is now; `running`: its answer is being written.
  update(running) {
    const node = this.node;
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    if (node.role === "assistant") {
      this.answer.show(node.text);
      this.showReasoning(running);
      this.showProgress(running);
      this.showProblem(running);
      this.figures.textContent = running ? "" : told(node);
      this.figures.hidden = running || !this.figures.textContent;
    }
    this.showActs(running);
  }

  showReasoning(running) {
    const text = this.node.reasoning || "";
    this.reasoning.hidden = !text;
    if (!text) return;
    const thinking = running && !this.node.text;
    this.summary.textContent = thinking ? `Thinking: ${plural(text.trim().split(/\s+/).length, "word")} so far` : `Reasoning: ${plural(text.trim().split(/\s+/).length, "word")}`;
    this.reasoning.classList.toggle("thinking", thinking);
    if (this.reasoning.open) this.thoughts.show(text);
  }

  showProgress(running) {
    const { progress, text, reasoning } = this.node, waiting = running && !text && !reasoning;
    this.progress.hidden = !waiting;
    if (!waiting) return;
    if (!this.progress.firstChild) {
      this.progress.append(element("span"), element("progress"));
      this.progress.lastChild.setAttribute("aria-label", "Prompt read");
    }
    const [words, bar] = this.progress.children, known = progress && progress.total > 0;
    bar.hidden = !known || progress.done >= progress.total;
    if (known) {
      bar.max = progress.total;
      bar.value = progress.done;
      const cached = progress.cached ? `, ${count(progress.cached)} from the cache` : "";
      words.textContent = progress.done >= progress.total ? "First token" : `Reading the prompt: ${count(progress.done)} of ${count(progress.total)} tokens${cached}`;
    } else words.textContent = this.node.place ? `Waiting: ${this.node.place}` : "Waiting for the server";
  }

  showProblem(running) {
    const { error } = this.node;
    this.problem.hidden = !error || running;
    if (!error || running) {
      this.problem.replaceChildren();
      return;
    }
    if (this.problem.childElementCount) return;
    const shown = trouble(error, { contextTokens: this.node.contextTokens }), buttons = element("div", "buttons");
    this.problem.setAttribute("role", "alert");
    for (const action of shown.actions) {
      const button = element("button", "", BUTTONS[action]);
      button.type = "button";
      button.addEventListener("click", () => this.on[action](this.node));
      if (action === "retry" && shown.wait) countDown(button, shown.wait);
      buttons.append(button);
    }
    this.problem.append(element("strong", "", shown.title), element("p", "", shown.text), buttons);
  }

  showActs(running) {
    const own = this.node.role === "user", [at, of] = this.chat.place(this.node), key = `${running} ${at} ${of} ${Boolean(this.node.text)}`;
    if (this.shownActs === key) return;
    this.shownActs = key;
    this.acts.replaceChildren();
    this.acts.hidden = running;
    if (running) return;
    if (of > 1) {
      const turn = element("span", "turn");
      turn.append(this.act("‹", "Earlier version", () => this.on.turn(this.node, -1), at === 0), element("span", "", `${at + 1} of ${of}`), this.act("›", "Later version", () => this.on.turn(this.node, 1), at === of - 1));
      this.acts.append(turn);
    }
    this.acts.append(this.act("Edit", own ? "Edit this message" : "Edit this answer", () => this.edit()));
    this.acts.append(this.act("Retry", own ? "Answer this message again" : "Write this answer again", () => this.on.retry(this.node)));
    if (this.node.text) {
      const copy = this.act("Copy", own ? "Copy this message" : "Copy this answer", () => {});
      copy.dataset.copy = "message";
      this.acts.append(copy);
    }
  }

  act(label, title, run, disabled = false) {
    const button = element("button", "plain", label);
    button.type = "button";
    button.disabled = disabled;
    if (title) button.setAttribute("aria-label", title);
    button.title = title;
    button.addEventListener("click", run);
    return button;
  }

  // A field in place of the words; Enter keeps, Escape leaves all as it was.
  edit() {
    if (this.element.querySelector("form.edit")) return;
    const own = this.node.role === "user", form = element("form", "edit"), area = element("textarea"), keep = element("button", "primary", own ? "Send" : "Keep"), leave = element("button", "plain", "Cancel");
    area.value = this.node.text;
    area.setAttribute("aria-label", own ? "Your message" : "The answer");
    area.rows = Math.min(16, Math.max(2, this.node.text.split("\n").length + 1));
    leave.type = "button";
    const foot = element("div", "buttons");
    foot.append(keep, leave);
    form.append(area, foot);
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.acts.querySelector('button[aria-label^="Edit"]')?.focus();
    };
    leave.addEventListener("click", close);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && event.target === area && own && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!area.value.trim()) return;
      close();
      this.on.edit(this.node, area.value);
    });
    this.element.classList.add("editing");
    this.element.insertBefore(form, this.acts);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

const REASONS = { stop: "", length: "reached the most tokens", cancelled: "stopped", stopped: "stopped by you" };

// What an answer cost, in one line.
function told(node) {
  const { usage, timings, stats, finish } = node, parts = [];
  if (usage) {
    const speed = timings?.decode_tok_s ?? node.ownSpeed, first = timings ? timings.ttft_ms / 1000 : node.ownFirst;
    parts.push(plural(usage.completion_tokens, "token") + (speed ? ` at ${figure(speed)} a second` : ""));
    if (first) parts.push(`first after ${seconds(first)}`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} from the cache` : ""}`);
    if (stats?.decode && timings?.decode_ms) parts.push(`${percent(stats.decode.hit_rate)} of experts in memory`, `stalled ${percent(stats.decode.stall_share)}`);
  }
  if (REASONS[finish] ?? finish) parts.push(REASONS[finish] ?? finish);
  return parts.join(" · ");
}

function countDown(button, wait) {
  const until = Date.now() + wait * 1000, label = button.textContent;
  const tick = () => {
    const left = Math.ceil((until - Date.now()) / 1000);
    button.textContent = left > 0 ? `${label} (${left})` : label;
    if (left > 0 && (button.isConnected || left >= Math.ceil(wait) - 1)) setTimeout(tick, 500);
  };
  tick();
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
