// Tells a screen reader the answer as it comes: whole sentences in a polite log, never single tokens.

export class Speaker {
  constructor(log) {
    this.log = log;
    this.held = "";
    this.code = false;
  }

  begin() {
    this.held = "";
    this.log.replaceChildren();
  }

  say(text) {
    this.held += text;
    const end = Math.max(this.held.lastIndexOf("\n"), ...[". ", "! ", "? ", ": "].map((mark) => this.held.lastIndexOf(mark)));
    if (end < 0) return;
    this.add(this.held.slice(0, end + 1));
    this.held = this.held.slice(end + 1);
  }

  end(last) {
    this.add(this.held);
    this.held = "";
    if (last) this.add(last);
  }

  add(text) {
    const plain = text.replace(/[`*_#>|]+/g, "").trim();
    if (!plain) return;
    const line = document.createElement("p");
    line.textContent = plain;
    this.log.append(line);
  }
}
