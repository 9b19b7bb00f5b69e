// Markdown to elements: only createElement and text, so that no word of a model becomes markup.
// Headings, paragraphs, lists, quotes, tables, rules, fenced code with a copy button; emphasis, code and links inside.

export class Rendered {
  // Keeps the elements of blocks whose text did not change: a growing answer redraws its last block alone.
  constructor(element, depth = 0) {
    this.element = element;
    this.depth = depth;
    this.sources = [];
  }

  show(text) {
    const blocks = this.depth > DEEPEST ? [{ kind: "paragraph", lines: [text] }] : split(text);
    blocks.forEach((block, i) => {
      const source = `${block.kind}\n${block.closed}\n${block.lines.join("\n")}`;
      if (this.sources[i] === source) return;
      this.sources[i] = source;
      const node = draw(block, this.depth);
      const old = this.element.children[i];
      if (old) old.replaceWith(node);
      else this.element.append(node);
    });
    this.sources.length = blocks.length;
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
  }
}

const DEEPEST = 8; // nested quotes and lists
const REACH = 2000; // characters that an inline mark may span: bounds the work on hostile text

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Blocks of the text, each with its lines. `closed` matters for code alone: whether the fence has ended.
function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i], fence = FENCE.exec(line);
    if (!line.trim()) i += 1;
    else if (fence) {
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`), body = [];
      for (i += 1; i < lines.length && !end.test(lines[i]); i += 1) body.push(lines[i]);
      blocks.push({ kind: "code", language: fence[2], lines: [fence[2], ...body], closed: i < lines.length });
      i += 1;
    } else if (HEADING.test(line)) {
      blocks.push({ kind: "heading", lines: [line] });
      i += 1;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: [line] });
      i += 1;
    } else if (line.includes("|") && TABLE_RULE.test(lines[i + 1] || "") && (lines[i + 1] || "").includes("-") && lines[i + 1].includes("|")) {
      i = take(blocks, "table", lines, i, (l) => l.trim() && l.includes("|"));
    } else if (QUOTE.test(line)) {
      i = take(blocks, "quote", lines, i, (l) => QUOTE.test(l));
    } else if (ITEM.test(line)) {
      i = take(blocks, "list", lines, i, (l, next) => ITEM.test(l) || (l.trim() && /^\s{2,}/.test(l)) || (!l.trim() && next !== undefined && (ITEM.test(next) || /^\s{2,}\S/.test(next))));
    } else {
      i = take(blocks, "paragraph", lines, i, (l, next, first) => first || (l.trim() && !FENCE.test(l) && !HEADING.test(l) && !RULE.test(l) && !QUOTE.test(l) && !ITEM.test(l)));
    }
  }
  return blocks;
}

function take(blocks, kind, lines, start, belongs) {
  let end = start;
  while (end < lines.length && belongs(lines[end], lines[end + 1], end === start)) end += 1;
  blocks.push({ kind, lines: lines.slice(start, Math.max(end, start + 1)) });
  return Math.max(end, start + 1);
}

function draw(block, depth) {
  switch (block.kind) {
    case "code":
      return drawCode(block.language, block.lines.slice(1).join("\n"));
    case "heading": {
      const [, marks, text] = HEADING.exec(block.lines[0]);
      // The page's own headings come first: an answer's begin at the third level.
      return inline(make(`h${Math.min(6, marks.length + 2)}`), text);
    }
    case "rule":
      return make("hr");
    case "quote": {
      const quote = make("blockquote");
      new Rendered(quote, depth + 1).show(block.lines.map((line) => QUOTE.exec(line)[1]).join("\n"));
      return quote;
    }
    case "list":
      return drawList(block.lines, depth);
    case "table":
      return drawTable(block.lines);
    default:
      return inline(make("p"), block.lines.map((line) => line.replace(/^ {1,3}/, "")).join("\n"));
  }
}

function drawCode(language, text) {
  const figure = make("figure", "code"), head = make("figcaption"), name = make("span"), copy = make("button"), pre = make("pre"), code = make("code");
  name.textContent = language || "text";
  copy.type = "button";
  copy.textContent = "Copy";
  copy.className = "copy";
  copy.dataset.copy = "code";
  copy.setAttribute("aria-label", `Copy this ${language || "text"} block`);
  code.textContent = text;
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `${language || "text"} block`);
  head.append(name, copy);
  pre.append(code);
  figure.append(head, pre);
  return figure;
}

function drawList(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]), ordered = /\d/.test(mark);
  const list = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) list.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items[items.length - 1].push(line);
  }
  for (const [first, ...more] of items) {
    const item = make("li"), body = dedent(more), task = /^\[([ xX])\]\s+(.*)$/.exec(first);
    if (task) item.append(task[1] === " " ? "☐ " : "☑ ");
    inline(item, task ? task[2] : first);
    if (body.trim()) {
      const inner = make("div");
      new Rendered(inner, depth + 1).show(body);
      item.append(...inner.children);
    }
    list.append(item);
  }
  return list;
}

function dedent(lines) {
  const depth = Math.min(...lines.filter((line) => line.trim()).map((line) => line.match(/^\s*/)[0].length), 99);
  return lines.map((line) => line.slice(depth)).join("\n");
}

function drawTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
  const aligned = cells(lines[1]).map((rule) => (/^:-+:$/.test(rule) ? "centre" : /-:$/.test(rule) ? "right" : "left"));
  const box = make("div", "table"), table = make("table"), head = make("thead"), body = make("tbody");
  const row = (line, tag) => {
    const tr = make("tr");
    cells(line).forEach((text, i) => {
      const cell = inline(make(tag, aligned[i]), text);
      if (tag === "th") cell.scope = "col";
      tr.append(cell);
    });
    return tr;
  };
  head.append(row(lines[0], "th"));
  body.append(...lines.slice(2).map((line) => row(line, "td")));
  table.append(head, body);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  box.append(table);
  return box;
}

const INLINE = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (m) => { const code = make("code"); code.textContent = m[2].replace(/^ (.*) $/, "$1"); return code; }],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, (m) => inline(make("strong"), m[1])],
  [/^__(?=\S)([\s\S]*?\S)__(?![\w_])/, (m) => inline(make("strong"), m[1]), true],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m) => inline(make("del"), m[1])],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (m) => inline(make("em"), m[1])],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?![\w_])/, (m) => inline(make("em"), m[1]), true],
  [/^\[([^\[\]\n]+)\]\(\s*<?([^\s<>()]+(?:\([^\s()]*\)[^\s()]*)?)>?(?:\s+"[^"]*")?\s*\)/, (m) => link(m[2], inline(make("a"), m[1]), m[0])],
  [/^<(https?:\/\/[^\s<>]+)>/, (m) => link(m[1], Object.assign(make("a"), { textContent: m[1] }), m[0])],
  [/^https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"*_`]/, (m) => link(m[0], Object.assign(make("a"), { textContent: m[0] }), m[0])],
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (m) => document.createTextNode(m[1])],
  [/^( {2,}|\\)\n/, () => make("br")],
];

// Fill `element` with text and its marks.
function inline(element, text) {
  let plain = "", i = 0;
  const flush = () => {
    if (plain) element.append(plain);
    plain = "";
  };
  while (i < text.length) {
    let node = null;
    if (/[`*_~[<h\\ ]/.test(text[i])) {
      const rest = text.slice(i, i + REACH), wordBefore = /\w/.test(text[i - 1] || "");
      for (const [pattern, build, atWord] of INLINE) {
        const found = (atWord || text[i] === "h") && wordBefore ? null : pattern.exec(rest);
        if (!found) continue;
        node = build(found);
        i += found[0].length;
        break;
      }
    }
    if (node) {
      flush();
      element.append(node);
    } else {
      plain += text[i];
      i += 1;
    }
  }
  flush();
  return element;
}

// A link to the web or to mail; anything else stays the text that it was.
function link(target, anchor, source) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return document.createTextNode(source);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(source);
  anchor.href = url.href;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer nofollow";
  return anchor;
}

function make(tag, className) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  return element;
}
