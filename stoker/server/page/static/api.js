// The server's doors: models, chat, live figures. Turns every failure into an ApiError of a known kind.
// Knows HTTP and server-sent events; no document.

export class ApiError extends Error {
  // kind: gone | cut | key | full | context | closing | memory | model | refused | failed
  constructor(kind, fields = {}) {
    super(fields.detail || kind);
    Object.assign(this, { kind, ...fields });
  }
}

let key = sessionStorage.getItem("stoker.key") || "";

export function getKey() {
  return key;
}

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("stoker.key", key);
  else sessionStorage.removeItem("stoker.key");
}

export async function models(signal) {
  const answer = await request("/v1/models", { signal });
  return (await answer.json()).data;
}

// The chunks of one answer, parsed.
export async function* chat(body, signal) {
  const answer = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(answer, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw told(chunk.error, answer.status);
    yield chunk;
  }
  throw new ApiError("cut");
}

// The live figures, one object a second.
export async function* live(signal) {
  const answer = await request("/live/stream", { signal });
  for await (const data of events(answer, signal)) yield JSON.parse(data);
}

async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("gone");
  }
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Not our JSON: something between us and the server answered.
  }
  throw told(error, answer.status, Number(answer.headers.get("Retry-After")) || undefined);
}

// The `data` of each event. A comment keeps the line alive and says nothing.
async function* events(answer, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } catch (error) {
    if (signal?.aborted || error instanceof ApiError) throw error;
    throw new ApiError("cut");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function told(error, status, retryAfter) {
  const detail = error.message || "";
  const fields = { detail, status, retryAfter, field: error.param, code: error.code };
  if (status === 401) return new ApiError("key", { ...fields, sentKey: key !== "" });
  if (error.code === "context_length_exceeded") {
    const numbers = (detail.match(/\d+(?= tokens)/g) || []).map(Number);
    if (numbers.length === 2) Object.assign(fields, { limitTokens: Math.min(...numbers), askedTokens: Math.max(...numbers) });
    return new ApiError("context", fields);
  }
  if (status === 429) return new ApiError("full", fields);
  if (error.code === "server_closing") return new ApiError("closing", fields);
  if (error.code === "memory_budget") return new ApiError("memory", fields);
  if (status === 404 && /model/.test(error.code || "")) return new ApiError("model", fields);
  return new ApiError(status >= 400 && status < 500 ? "refused" : "failed", fields);
}
