// Questions that the tests put to a page, as functions; the tests' browser defines them before it asks.

// What stands out to the right of the screen, scrolling boxes' insides apart.
function overflowing() {
  const inside = ".code, .table, .unseen, .skip";
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.closest(inside) && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map((e) => e.outerHTML.slice(0, 90))
    .concat(document.documentElement.scrollWidth > innerWidth ? ["the page itself"] : []);
}

// What is too small to touch (WCAG 2.5.8).
function tooSmall() {
  return [...document.querySelectorAll("button, select, input, textarea, summary")]
    .filter((e) => e.checkVisibility())
    .map((e) => [e.getBoundingClientRect(), e.outerHTML.slice(0, 80)])
    .filter(([box]) => box.width < 24 || box.height < 24);
}

// [texts with too little contrast against what is behind them (WCAG 1.4.3), kinds of elements that were measured].
function poorContrast() {
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [], kinds = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const speaks = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.matches("textarea, input, select");
    if (!speaks || !e.checkVisibility() || e.closest("button:disabled, .unseen, noscript, option")) continue;
    const style = getComputedStyle(e), a = luminance(numbers(style.color)), b = luminance(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    kinds.add(`${e.tagName}.${e.className}`);
    if (ratio < (large ? 3 : 4.5)) poor.push([ratio.toFixed(2), style.color, e.outerHTML.slice(0, 100)]);
  }
  return [poor, kinds.size];
}

// Ids that attributes point at and nothing has; ids that two elements have.
function brokenIds() {
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  const pointing = ["aria-labelledby", "aria-describedby", "aria-controls", "for"].flatMap((name) =>
    [...document.querySelectorAll(`[${name}]`)].flatMap((e) => e.getAttribute(name).split(" ")));
  return pointing.filter((id) => !ids.includes(id)).concat(ids.filter((id, i) => ids.indexOf(id) !== i));
}

function headingLevels() {
  return [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter((e) => e.checkVisibility()).map((e) => +e.tagName[1]);
}

// [width, height, number of colours] of a canvas.
function painted(id) {
  const canvas = document.getElementById(id), { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 4).join());
  return [canvas.width, canvas.height, new Set(colours).size];
}

function ledgerRow(name) {
  return [...document.querySelectorAll("#memory-table tr")].find((row) => row.innerText.includes(name)).cells[1].innerText;
}

function ledgerShares() {
  return [...document.querySelectorAll("#memory-bar .part")].map((e) => parseFloat(e.style.width));
}

function outline() {
  const style = getComputedStyle(document.activeElement);
  return [style.outlineStyle, parseFloat(style.outlineWidth)];
}

// Whether a text that grows letter by letter ends as the text drawn at once.
async function growsAlike(text) {
  const { Rendered } = await import("/static/markdown.js");
  const slow = document.createElement("div"), fast = document.createElement("div"), view = new Rendered(slow);
  for (let i = 1; i <= text.length; i += 1) view.show(text.slice(0, i));
  new Rendered(fast).show(text);
  return fast.innerHTML.length > 100 && slow.innerHTML === fast.innerHTML;
}

// Milliseconds that drawing these texts takes.
async function drawingMs(texts) {
  const { Rendered } = await import("/static/markdown.js"), start = performance.now();
  for (const text of texts) new Rendered(document.createElement("div")).show(text);
  return performance.now() - start;
}
