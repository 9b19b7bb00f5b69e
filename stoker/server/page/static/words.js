// Numbers and troubles in words. Pure: no document, no network.

export function bytes(n) {
  if (!n) return n === 0 ? "0" : "–";
  const gib = n / 2 ** 30, mib = n / 2 ** 20;
  return gib >= 1 ? `${gib.toFixed(2)} GiB` : mib >= 1 ? `${mib.toFixed(0)} MiB` : `${(n / 1024).toFixed(0)} KiB`;
}

export function count(n) {
  return n == null ? "–" : Math.round(n).toLocaleString("en");
}

export function figure(n) {
  if (n == null) return "–";
  return n >= 100 ? count(n) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

export function percent(share, digits = 0) {
  return share == null ? "–" : `${(100 * share).toFixed(digits)}%`;
}

export function seconds(s) {
  if (s == null) return "–";
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 100) return `${s < 9.95 ? s.toFixed(1) : Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  return minutes < 100 ? `${minutes} min` : minutes < 2880 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

// What went wrong, for the reader: title, what to do, and which buttons help.
export function trouble(error, context = {}) {
  const said = error.detail ? sentence(error.detail) : "";
  switch (error.kind) {
    case "gone":
      return { title: "The server does not answer", text: "Is stoker serve still running, and is this machine still connected to it? Your message is kept.", actions: ["retry"] };
    case "cut":
      return { title: "The connection broke in the middle of the answer", text: "What had arrived is kept. Check that the server still runs, then try again.", actions: ["retry"] };
    case "key":
      return { title: "The server wants an API key", text: error.sentKey ? "The key that was sent is wrong. Give the one that the server was started with (--api-key)." : "Give the key that the server was started with (--api-key).", actions: ["key"] };
    case "full":
      return { title: "The server is busy", text: `Its queue is full. Try again in ${plural(error.retryAfter ?? 1, "second")}.`, actions: ["retry"], wait: error.retryAfter ?? 1 };
    case "context":
      return { title: "This conversation is too long for the model", text: contextText(error, context), actions: ["new"] };
    case "closing":
      return { title: "The server is shutting down", text: "It takes no new requests. Try again when it is back.", actions: ["retry"] };
    case "memory":
      return { title: "There is no memory for this model now", text: `${said} Try again when the other model is idle.`, actions: ["retry"] };
    case "model":
      return { title: "The server has no such model", text: `${said} Choose another one at the top.`, actions: ["retry"] };
    case "refused":
      return { title: "The server refused the request", text: said || "It gave no reason.", actions: ["settings", "retry"] };
    default:
      return { title: "The server failed", text: said || "Its log says more.", actions: ["retry"] };
  }
}

function contextText(error, { contextTokens }) {
  const asked = error.askedTokens, limit = error.limitTokens ?? contextTokens;
  const numbers = asked && limit ? `It needs ${count(asked)} tokens, and ${count(limit)} is the most. ` : limit ? `${count(limit)} tokens is the most. ` : "";
  return `${numbers}Edit an earlier message to make it shorter, ask for fewer tokens, or start a new chat. The server's --ctx-size sets the limit.`;
}

function sentence(text) {
  const trimmed = text.trim();
  const first = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}
