// The live figures: one stream from the server, shown as tiles, bars, rows and a heat map.
// Knows the shape of /live; the chat is another file's.

import { live } from "./api.js";
import { HeatMap, sparkline, stackedBar } from "./charts.js";
import { onTheme } from "./theme.js";
import { bytes, count, figure, percent, plural, seconds } from "./words.js";

const HISTORY = 120;
const PARTS = [
  ["process", "libraries"],
  ["dense", "dense"],
  ["kv", "KV cache"],
  ["prefix", "prefixes"],
  ["grammar", "grammars"],
  ["slots", "slots"],
  ["ring", "ring"],
  ["scratch", "scratch"],
  ["reserve", "reserve"],
  ["free", "free"],
];
const NOW = ["now", "in use"];
const percentOf = (share) => percent(share);
// With a history: text of its value now, or the last there was. Without: text and a note of the model.
const TILES = [
  { name: "tok_s", label: "tokens a second", history: 0, text: figure },
  { name: "first", label: "time to first token", text: (m) => seconds(m.first_token_s.last), note: (m) => (m.first_token_s.count < 2 ? "" : `median\n${seconds(m.first_token_s.median)}`) },
  { name: "stall", label: "stalled on the disk", history: 1, most: 1, text: percentOf },
  { name: "hits", label: "experts in memory", history: 2, most: 1, text: percentOf },
  { name: "disk", label: "MB/s from the disk", history: 3, text: (rate) => figure(rate == null ? null : rate / 1e6) },
  { name: "prefix", label: "prompt from cache", text: (m) => (m.tokens.prompt ? percent(m.tokens.cached / m.tokens.prompt) : "–"), note: (m) => (m.tokens.prompt ? `${count(m.tokens.cached)} of\n${count(m.tokens.prompt)}` : "") },
];

const $ = (id) => document.getElementById(id);
const heat = new HeatMap($("heat"));
let history = {}, chosen = "", last = null, onLink = () => {}, onSample = () => {};

export function chooseModel(name) {
  chosen = name;
  if (last) show(last);
}

// `link(state, error)`: "on", or "off" with the error, whenever that changes; `sample(data)`: every sample.
export function startLive(link, sample) {
  onLink = link;
  onSample = sample;
  drawTiles();
  watchHeat();
  onTheme(() => heat.draw());
  follow();
}

let stopped = null, wake = () => {};

// Ask again at once: the key changed, or the reader came back.
export function reconnect() {
  stopped?.abort();
  wake();
}

async function follow() {
  document.addEventListener("visibilitychange", () => (document.hidden ? stopped?.abort() : wake()));
  for (let failures = 0; ; ) {
    if (document.hidden) {
      await sleep(3600);
      continue;
    }
    stopped = new AbortController();
    let problem = null;
    try {
      for await (const sample of live(stopped.signal)) {
        failures = 0;
        onLink("on");
        try {
          take(sample);
        } catch (error) {
          console.error(error); // a fault of the drawing is not one of the line
        }
      }
    } catch (error) {
      problem = error;
    }
    if (stopped.signal.aborted) {
      await sleep(0.05);
      continue;
    }
    failures += 1;
    onLink("off", problem);
    grey();
    await sleep(Math.min(10, 2 ** (failures - 1)));
  }
}

function sleep(s) {
  return new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, s * 1000);
  });
}

function take(sample) {
  if (sample.history) history = sample.history;
  else {
    for (const [name, model] of Object.entries(sample.models)) {
      if (!model.loaded) continue;
      const { tok_s, stall_of_steps, hit_rate, read_bytes_s } = model.rates;
      const rows = (history[name] ||= []);
      rows.push([tok_s, stall_of_steps, hit_rate, read_bytes_s]);
      if (rows.length > HISTORY) rows.shift();
    }
  }
  last = sample;
  show(sample);
  onSample(sample);
}

function grey() {
  $("live").classList.add("stale");
  $("live-note").textContent = "out of touch: the last figures";
}

function show(sample) {
  const names = Object.keys(sample.models), name = names.includes(chosen) ? chosen : names[0], model = sample.models[name];
  $("live").classList.remove("stale");
  if (!model) return;
  showModels(sample.models);
  $("live-note").textContent = model.loaded ? state(model) + routed(model) : "not in memory: loads when asked";
  showTotals(sample, model);
  $("live").classList.toggle("asleep", !model.loaded);
  if (!model.loaded) return;
  showTiles(model, history[name] || []);
  showMemory(model.ledger, sample.rss_bytes);
  showQueue(model.status);
  showHeat(model.heat);
}

// Where there are several: which are in memory.
function showModels(models) {
  const names = Object.keys(models);
  $("models-rows").hidden = names.length < 2;
  $("models-rows").replaceChildren(...(names.length < 2 ? [] : names.map((name) => {
    const row = document.createElement("li"), { loaded, state: stage, status } = models[name];
    row.append(Object.assign(document.createElement("b"), { textContent: name }), Object.assign(document.createElement("span"), {
      textContent: !loaded ? (stage === "loading" ? "loading" : "not in memory") : status.running ? `${status.running} running` : "in memory, idle",
    }));
    return row;
  })));
}

function state({ status }) {
  if (!status.healthy) return `not healthy: ${status.error || "see the log"}`;
  if (status.draining) return "shutting down";
  const reading = status.sequences.some((row) => row.phase === "prefill");
  return status.running === 0 ? "idle" : reading ? "reading a prompt" : "writing";
}

// A mode that changes the output is said, with what the probe saw of it, and that it was given up.
function routed({ quality }) {
  const { routing, probe } = quality;
  if (routing.fell_back_from) return `; ${routing.fell_back_from} broke its bound: exact since`;
  if (routing.lossless) return "";
  if (!probe || !probe.probes) return `; routing ${routing.mode}`;
  return `; routing ${routing.mode}, KL ${probe.kl_mean.toPrecision(2)} of ${probe.kl_limit.toPrecision(2)}`;
}

function drawTiles() {
  for (const tile of TILES) {
    const box = document.createElement("div"), label = document.createElement("dt"), value = document.createElement("dd");
    box.id = `tile-${tile.name}`;
    label.textContent = tile.label;
    value.append(Object.assign(document.createElement("b"), { textContent: "–" }));
    if (tile.history != null) {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("class", "spark");
      svg.setAttribute("aria-hidden", "true");
      value.append(svg);
    } else value.append(document.createElement("small"));
    box.append(label, value);
    $("tiles").append(box);
  }
}

function showTiles(model, rows) {
  for (const tile of TILES) {
    const value = $(`tile-${tile.name}`).lastElementChild;
    if (tile.history != null) {
      const last = rows.findLast((row) => row[tile.history] != null), now = rows.at(-1)?.[tile.history];
      value.parentElement.classList.toggle("old", now == null && last != null);
      value.firstChild.textContent = tile.text((now ?? last?.[tile.history]) ?? null);
      const padded = [...Array(Math.max(0, HISTORY - rows.length)).fill(null), ...rows.map((row) => row[tile.history])];
      sparkline(value.lastChild, padded, tile.most);
    } else {
      value.firstChild.textContent = tile.text(model);
      value.lastChild.textContent = tile.note(model);
    }
  }
}

function showMemory(ledger, rss) {
  const budget = ledger.budget_bytes;
  $("memory-text").textContent = `A budget of ${bytes(budget)}; ${percent(ledger.resident_share)} of the experts fit`;
  stackedBar($("memory-bar"), PARTS.map(([name]) => ({ name, share: (ledger[`${name}_bytes`] || 0) / budget })), rss / budget);
  const body = $("memory-table").tBodies[0];
  [...PARTS, NOW].forEach(([name, label], i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      const head = document.createElement("th"), swatch = document.createElement("i");
      head.scope = "row";
      swatch.className = `part ${name}`;
      head.append(swatch, label);
      row.append(head);
      row.insertCell();
    }
    row.cells[1].textContent = bytes(name === "now" ? rss : ledger[`${name}_bytes`] || 0);
  });
}

function showQueue(status) {
  $("queue-text").textContent = `${status.running} of ${status.parallel} running, ${status.waiting} of ${status.queue} waiting`;
  const list = $("queue-rows");
  status.sequences.slice(0, 8).forEach((row, i) => {
    const item = list.children[i] || drawRow(list);
    const [name, bar, text] = item.children;
    name.textContent = `#${row.id}`;
    bar.hidden = row.phase !== "prefill";
    bar.max = row.prompt_tokens || 1;
    bar.value = row.prefilled_tokens;
    text.textContent =
      row.phase === "waiting" ? `waits ${seconds(row.age_s)}`
      : row.phase === "prefill" ? `reads ${count(row.prefilled_tokens)} of ${count(row.prompt_tokens)}`
      : `prompt ${count(row.prompt_tokens)}, wrote ${count(row.generated_tokens)}`;
  });
  while (list.children.length > Math.min(8, status.sequences.length)) list.lastElementChild.remove();
  const share = status.kv_total_tokens ? status.kv_used_tokens / status.kv_total_tokens : 0;
  $("kv-text").textContent = `KV cache: ${count(status.kv_used_tokens)} of ${count(status.kv_total_tokens)} tokens`;
  stackedBar($("kv-bar"), [{ name: "kv", share }, { name: "free", share: 1 - share }]);
}

function drawRow(list) {
  const item = document.createElement("li"), bar = document.createElement("progress");
  bar.setAttribute("aria-label", "Prompt tokens read");
  item.append(document.createElement("b"), bar, document.createElement("span"));
  list.append(item);
  return item;
}

function showHeat(data) {
  if (!data.layers) return;
  heat.show(data);
  $("heat-text").textContent = data.top_share ? `Rows: ${data.layers} layers; columns: ${data.experts} experts; lately` : `${data.layers} layers of ${data.experts} experts; no token yet`;
  $("heat").nextElementSibling.hidden = !data.top_share;
  $("heat-even").textContent = `even ${percent(1 / data.experts, 1)}`;
  $("heat-top").textContent = percent(data.top_share, 1);
  $("heat").setAttribute("aria-label", `Heat map of expert use: ${data.layers} layers of ${data.experts} experts. The most used expert takes ${percent(data.top_share, 1)} of its layer's choices; even use would be ${percent(1 / data.experts, 1)}.`);
  if (heat.at) read(...heat.at);
}

function read(layer, expert) {
  heat.at = [layer, expert];
  $("heat-read").textContent = `Layer ${layer}, expert ${expert}: ${percent(heat.share(layer, expert), 1)} of the choices (even use: ${percent(1 / heat.data.experts, 1)})`;
}

function watchHeat() {
  const canvas = $("heat"), steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  canvas.addEventListener("pointermove", (event) => heat.data?.layers && read(...heat.cellAt(event)));
  canvas.addEventListener("focus", () => $("heat-read").setAttribute("aria-live", "polite"));
  canvas.addEventListener("blur", () => $("heat-read").setAttribute("aria-live", "off"));
  canvas.addEventListener("keydown", (event) => {
    if (!steps[event.key] || !heat.data?.layers) return;
    event.preventDefault();
    const [layer, expert] = heat.at || [0, -1], [down, right] = steps[event.key];
    read(Math.min(heat.data.layers - 1, Math.max(0, layer + down)), Math.min(heat.data.experts - 1, Math.max(0, expert + right)));
  });
}

function showTotals(sample, model) {
  const sum = (group) => Object.values(group).reduce((a, b) => a + b, 0), counters = model.counters;
  const rows = [
    ["answers", count(sum(model.finished))],
    ["refused", count(sum(model.refused))],
    ["tokens written", count(model.tokens.completion)],
  ];
  if (counters) {
    rows.push(["read from the disk", bytes(counters.demand_bytes + counters.prefetch_bytes)]);
    rows.push(["experts dropped", count(counters.dropped_experts)]);
  }
  if (model.prefix) {
    const { hit_tokens: found, lookup_tokens: asked, ram_bytes: ram, disk_bytes: disk } = model.prefix;
    rows.push(["prompt tokens in cached prefixes", `${count(found)} of ${count(asked)}`]);
    rows.push(["prefixes kept", disk ? `${bytes(ram)}, ${bytes(disk)} on disk` : bytes(ram)]);
  }
  rows.push(["up for", seconds(sample.uptime_s)], ["version", sample.version]);
  $("totals").replaceChildren(...rows.flatMap(([label, value]) => [
    Object.assign(document.createElement("dt"), { textContent: label }),
    Object.assign(document.createElement("dd"), { textContent: value }),
  ]));
}
