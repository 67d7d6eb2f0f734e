// Markdown of a model as elements. Linear in the length of the text; HTML in it stays text, links
// lead to the web or to mail only, and pictures are links.
import { h } from "./dom.js";
import { paint } from "./highlight.js";

const MAX_INLINE = 50000; // letters of a paragraph that are looked at for marks
const MAX_SHOWN = 200000; // letters of a message that are shown at all
const DEEPEST = 8; // quotes in lists in quotes
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])[ \t]+(\S.*)?$/;
const DIVIDER = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /https?:\/\/[^\s<>()"'`*]+/y;

/** Show `text` in `box`; what is there already of an earlier, shorter text stays as it is. */
export function showMarkdown(box, text) {
  const cut = text.length > MAX_SHOWN;
  const found = splitBlocks(cut ? text.slice(0, MAX_SHOWN) : text);
  if (cut) found.push(`… and ${text.length - MAX_SHOWN} more letters: export the conversation`);
  const shown = box.blocks || [];
  let same = 0;
  while (same < shown.length && shown[same].text === found[same]) same += 1;
  for (const block of shown.splice(same)) block.element.remove();
  for (const block of found.slice(same)) {
    const element = h("div.block", {}, renderBlocks(block.split("\n"), 0));
    box.append(element);
    shown.push({ text: block, element });
  }
  box.blocks = shown;
}

/** Return the pieces of a text between blank lines; fences and lists stay whole. */
export function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (closes(line, fence)) fence = null;
      continue;
    }
    const blank = !line.trim();
    const more = lines.length && ITEM.test(lines[0]) && (blank || /^ |^\t/.test(line) || ITEM.test(line));
    if (blank && !more) flush();
    else {
      if (!more && lines.length && !lines[lines.length - 1].trim()) flush();
      lines.push(line);
      fence = opens(line);
    }
  }
  flush();
  return blocks;
}

const opens = (line) => (line.length < 300 && FENCE.exec(line)?.[1]) || null;

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function renderBlocks(lines, depth) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const short = line.length < 2000 ? line : "";
    const render = !line.trim() ? skipLine
      : FENCE.test(short) ? renderCode
      : HEADING.test(short) ? renderHeading
      : RULE.test(short) ? renderRule
      : depth < DEEPEST && /^ {0,3}>/.test(line) ? renderQuote
      : depth < DEEPEST && ITEM.test(short) ? renderList
      : startsTable(lines, at) ? renderTable
      : renderParagraph;
    const [node, next] = render(lines, at, depth);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

const skipLine = (_lines, at) => [null, at + 1];
const renderRule = (_lines, at) => [h("hr"), at + 1];

function renderHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  const level = Math.min(6, marks.length + 2); // below the page's own
  return [h(`h${level}`, {}, renderInline(text.replace(/[ \t]+#{1,9}[ \t]*$/, ""))), at + 1];
}

function renderCode(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const copy = h("button.quiet.copy", {
    type: "button",
    onclick: async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    },
  }, "Copy");
  const code = h("code", {}, paint(text, language.toLowerCase()));
  const head = h("div.head", {}, h("span", {}, language || "text"), copy);
  return [h("div.code", {}, head, h("pre", { tabIndex: 0 }, code)), end + 1];
}

function renderQuote(lines, at, depth) {
  const inside = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) {
    inside.push(lines[at].replace(/^ {0,3}> ?/, ""));
    at += 1;
  }
  return [h("blockquote", {}, renderBlocks(inside, depth + 1)), at];
}

function renderList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = first[2].length > 1;
  const indent = first[1].length;
  const items = [];
  while (at < lines.length) {
    const found = lines[at].length < 2000 ? ITEM.exec(lines[at]) : null;
    if (found && found[1].length <= indent && (found[2].length > 1) === ordered) {
      items.push([found[3] || ""]);
    } else if (!lines[at].trim() || (/^[ \t]/.test(lines[at]) && lines[at].length)) {
      items[items.length - 1].push(lines[at].replace(new RegExp(`^ {0,${indent + 4}}`), ""));
    } else break;
    at += 1;
  }
  const start = ordered ? { start: Number.parseInt(first[2], 10) } : {};
  const each = items.map((item) => h("li", {}, tight(renderBlocks(item, depth + 1))));
  return [h(ordered ? "ol" : "ul", start, each), at];
}

/** Return the nodes of an item, its first paragraph without a box of its own. */
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function startsTable(lines, at) {
  const next = lines[at + 1];
  const bounded = lines[at].length < 5000 && lines[at].includes("|");
  return bounded && next !== undefined && next.length < 5000 && next.includes("-")
    && next.includes("|") && DIVIDER.test(next);
}

function cells(line) {
  const parts = line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function renderTable(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return right ? (left ? "center" : "right") : "";
  });
  const row = (tag, line) => h("tr", {}, cells(line).slice(0, 50).map((cell, i) => {
    const found = h(tag, {}, renderInline(cell));
    if (sides[i]) found.className = sides[i];
    return found;
  }));
  const head = h("thead", {}, row("th", lines[at]));
  const rows = [];
  at += 2;
  while (at < lines.length && lines[at].includes("|") && lines[at].trim()) {
    rows.push(row("td", lines[at]));
    at += 1;
  }
  const table = h("table", {}, head, h("tbody", {}, rows));
  return [h("div.wide", { tabIndex: 0, role: "region", "aria-label": "Table" }, table), at];
}

function renderParagraph(lines, at) {
  const text = [lines[at]];
  at += 1;
  while (at < lines.length && lines[at].trim() && !startsBlock(lines, at)) {
    text.push(lines[at]);
    at += 1;
  }
  return [h("p", {}, renderInline(text.join("\n"))), at];
}

function startsBlock(lines, at) {
  const line = lines[at];
  if (line.length >= 2000) return false;
  return [FENCE, HEADING, RULE, ITEM].some((mark) => mark.test(line)) || /^ {0,3}>/.test(line)
    || startsTable(lines, at);
}

// ---- inside a paragraph ----

const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const MOST_OPEN = 16;

/** Return the nodes of a text: code, links, emphasis, line breaks. */
export function renderInline(text) {
  if (text.length > MAX_INLINE) return [text];
  return new Inline(text).render();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.open = [{ mark: "", nodes: [] }]; // what is emphasised, from the outside in
    this.plain = ""; // text that is not yet a node
    this.ends = matchBrackets(text);
    this.unclosed = new Set(); // lengths of back-quotes that do not come again
  }

  render() {
    let at = 0;
    while (at < this.text.length) at = this.step(at);
    while (this.open.length > 1) this.abandon();
    this.flush();
    return this.open[0].nodes;
  }

  step(at) {
    const letter = this.text[at];
    const next = this.text[at + 1];
    if (letter === "\\" && next && /[!-/:-@[-`{-~]/.test(next)) return this.take(next, at + 2);
    if (letter === "\n") return this.add(h("br"), at + 1);
    if (letter === "`") return this.code(at);
    if (letter === "[" || (letter === "!" && next === "[")) return this.link(at);
    if (letter === "h") return this.address(at);
    if (letter === "*" || letter === "_" || (letter === "~" && next === "~")) return this.emphasis(at);
    return this.take(letter, at + 1);
  }

  take(text, next) {
    this.plain += text;
    return next;
  }

  flush() {
    if (this.plain) this.open[this.open.length - 1].nodes.push(this.plain);
    this.plain = "";
  }

  add(node, next) {
    this.flush();
    this.open[this.open.length - 1].nodes.push(node);
    return next;
  }

  code(at) {
    let start = at;
    while (this.text[start] === "`") start += 1;
    const ticks = this.text.slice(at, start);
    if (this.unclosed.has(ticks.length)) return this.take(ticks, start);
    for (let end = this.text.indexOf(ticks, start); end >= 0;) {
      let after = end;
      while (this.text[after] === "`") after += 1;
      if (after - end === ticks.length) {
        const inside = this.text.slice(start, end).replaceAll("\n", " ");
        const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
        return this.add(h("code", {}, padded ? inside.slice(1, -1) : inside), after);
      }
      end = this.text.indexOf(ticks, after);
    }
    this.unclosed.add(ticks.length);
    return this.take(ticks, start);
  }

  link(at) {
    const start = this.text[at] === "!" ? at + 1 : at;
    const end = this.ends.get(start);
    const close = end && this.text[end + 1] === "(" ? this.closing(end + 2) : -1;
    if (close < 0) return this.take(this.text.slice(at, start + 1), start + 1);
    const label = this.text.slice(start + 1, end);
    const [url] = this.text.slice(end + 2, close).trim().split(/\s/);
    return this.add(makeLink(url.replace(/^<|>$/g, ""), label || url), close + 1);
  }

  closing(from) {
    let depth = 1;
    for (let at = from; at < Math.min(this.text.length, from + 2000); at += 1) {
      if (this.text[at] === "\n") return -1;
      if (this.text[at] === "(") depth += 1;
      if (this.text[at] === ")") depth -= 1;
      if (!depth) return at;
    }
    return -1;
  }

  address(at) {
    LINK.lastIndex = at;
    const found = LINK.exec(this.text)?.[0].replace(/[.,;:!?]+$/, "");
    if (!found) return this.take("h", at + 1);
    return this.add(makeLink(found, found), at + found.length);
  }

  emphasis(at) {
    const letter = this.text[at];
    const mark = this.text[at + 1] === letter ? letter + letter : letter;
    const next = at + mark.length;
    const [before, after] = [this.text[at - 1] || " ", this.text[next] || " "];
    const word = letter === "_" && /\w/.test(before) && /\w/.test(after); // snake_case
    const place = this.open.findLastIndex((frame) => frame.mark === mark);
    if (place > 0 && /\S/.test(before) && !word) {
      while (this.open.length > place + 1) this.abandon();
      this.flush();
      const { nodes } = this.open.pop();
      return this.add(h(MARKS[mark], {}, nodes), next);
    }
    if (/\S/.test(after) && !word && this.open.length < MOST_OPEN) {
      this.flush();
      this.open.push({ mark, nodes: [] });
      return next;
    }
    return this.take(mark, next);
  }

  /** Make a mark that nothing closes a text again. */
  abandon() {
    this.flush();
    const { mark, nodes } = this.open.pop();
    this.open[this.open.length - 1].nodes.push(mark, ...nodes);
  }
}

function matchBrackets(text) {
  const ends = new Map();
  const open = [];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) ends.set(open.pop(), at);
  }
  return ends;
}

/** Return a link to the web or to mail, or for any other address just the label. */
export function makeLink(url, label) {
  let protocol = "";
  try {
    ({ protocol } = new URL(url));
  } catch { /* not an absolute address */ }
  if (!["http:", "https:", "mailto:"].includes(protocol)) return label;
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
