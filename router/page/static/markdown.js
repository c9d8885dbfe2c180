// Renders Markdown as elements. Model output is never parsed as HTML, and links are only created
// for web and mail addresses.

import { element } from "./dom.js";

/** Maximum nesting of quotes, lists and emphasis; deeper levels are shown as text. */
const MAX_DEPTH = 6;
// All patterns match in linear time, because model output is arbitrary.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^(-+|\*+|_+)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^[ :|-]+$/;
const URL_START = /https?:\/\/[^\s<>"`]+/y;
/** Characters that do not end a URL in running text. */
const CLOSING = ".,;:!?'\")]*_";
const WORD = /[\p{L}\p{N}]/u;

const sources = new WeakMap();

/** Renders text in an element. Blocks that have not changed since the last call are kept. */
export function showMarkdown(root, text) {
  const blocks = blocksOf(text.split("\n"), 0);
  blocks.forEach(({ kind, lines }, index) => {
    const source = `${kind}\n${lines.join("\n")}`;
    const shown = root.childNodes[index];
    if (shown && sources.get(shown) === source) return;
    const made = elementOf(kind, lines, 0);
    sources.set(made, source);
    if (shown) shown.replaceWith(made);
    else root.append(made);
  });
  while (root.childNodes.length > blocks.length) root.lastChild.remove();
}

/** Splits lines into blocks, each with its kind and lines. */
function blocksOf(lines, depth) {
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    if (!lines[start].trim()) {
      start += 1;
      continue;
    }
    const kind = kindOf(lines, start, depth);
    const end = ENDS[kind](lines, start, depth);
    blocks.push({ kind, lines: lines.slice(start, end) });
    start = end;
  }
  return blocks;
}

function kindOf(lines, at, depth) {
  const line = lines[at];
  if (isFence(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (isRule(line)) return "rule";
  if (depth < MAX_DEPTH && QUOTE.test(line)) return "quote";
  if (depth < MAX_DEPTH && ITEM.test(line)) return "list";
  if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

function isFence(line) {
  const fence = FENCE.exec(line);
  return fence !== null && !(fence[1][0] === "`" && line.slice(fence[0].length).includes("`"));
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && RULE.test(marks);
}

function isTableRule(line) {
  return line.includes("|") && line.includes("-") && TABLE_RULE.test(line);
}

/** The index of the line after a block, by kind. */
const ENDS = {
  code: endOfCode,
  heading: (lines, start) => start + 1,
  rule: (lines, start) => start + 1,
  quote: (lines, start) => firstWhere(lines, start, (line) => !QUOTE.test(line)),
  list: endOfList,
  table: (lines, start) => firstWhere(lines, start + 2, (line) => !line.includes("|")),
  paragraph: (lines, start, depth) =>
    firstWhere(lines, start + 1, (line, at) => {
      return !line.trim() || kindOf(lines, at, depth) !== "paragraph";
    }),
};

function firstWhere(lines, start, holds) {
  for (let at = start; at < lines.length; at += 1) if (holds(lines[at], at)) return at;
  return lines.length;
}

/** An unclosed fence contains all remaining lines. */
function endOfCode(lines, start) {
  const fence = FENCE.exec(lines[start])[1];
  const closes = (line) => {
    const mark = line.trim();
    return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
  };
  return Math.min(firstWhere(lines, start + 1, closes) + 1, lines.length);
}

/** A list continues with items and indented lines, even after empty lines. */
function endOfList(lines, start) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  let wasEmpty = false;
  return firstWhere(lines, start + 1, (line) => {
    const follows = !wasEmpty;
    wasEmpty = !line.trim();
    if (wasEmpty) return false;
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) return isNumber(item[2]) !== isNumber(mark);
    if (line.startsWith("  ")) return false;
    return !follows || isFence(line) || HEADING.test(line);
  });
}

function isNumber(mark) {
  return mark.length > 1;
}

function elementOf(kind, lines, depth) {
  if (kind === "code") return codeOf(lines);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The page itself uses h1 and h2.
    return filled(`h${Math.min(marks.length + 2, 6)}`, inlines(text, 0));
  }
  if (kind === "rule") return element("hr");
  if (kind === "quote") {
    const inner = lines.map((line) => line.replace(QUOTE, ""));
    return filled("blockquote", childrenOf(inner, depth + 1));
  }
  if (kind === "list") return listOf(lines, depth);
  if (kind === "table") return tableOf(lines);
  return filled("p", inlines(lines.join("\n"), 0));
}

/** An element with children, added one by one: the number of arguments of a call is limited. */
function filled(tag, children) {
  const made = element(tag);
  for (const child of children) made.append(child);
  return made;
}

function childrenOf(lines, depth) {
  return blocksOf(lines, depth).map((block) => elementOf(block.kind, block.lines, depth));
}

function codeOf(lines) {
  const last = lines.at(-1).trim();
  const isClosed = lines.length > 1 && /^(`{3,}|~{3,})$/.test(last);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  return element("pre", {}, element("code", {}, code));
}

function listOf(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.slice(Math.min(indentOf(line), indent.length + 4)));
  }
  const children = items.map((inner) => filled("li", itemOf(inner, depth)));
  const made = filled(isNumber(mark) ? "ol" : "ul", children);
  if (isNumber(mark)) made.start = Number.parseInt(mark, 10);
  return made;
}

/** An item with a single paragraph contains its text directly. */
function itemOf(lines, depth) {
  const blocks = childrenOf(lines, depth + 1);
  return blocks[0]?.localName === "p" ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function tableOf(lines) {
  const [head, , ...rows] = lines.map((line) => {
    const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
    return inner.split("|").map((cell) => cell.trim());
  });
  const row = (cells, tag) =>
    filled(
      "tr",
      cells.map((cell) => filled(tag, inlines(cell, 0))),
    );
  const body = rows.map((cells) => row(cells, "td"));
  return element("table", {}, element("thead", {}, row(head, "th")), filled("tbody", body));
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Texts and elements of a line or paragraph. */
function inlines(text, depth) {
  const nodes = [];
  /** Marks without an end after this position, so that they are searched only once. */
  const unclosed = new Set();
  let plain = "";
  let at = 0;
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? inlineAt(text, at, depth, unclosed) : null;
    if (found?.node) add(found.node);
    else plain += found?.text ?? text[at];
    at += found?.length ?? 1;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** The element or text that starts at a position, with its length; null if there is none. */
function inlineAt(text, at, depth, unclosed) {
  const first = text[at];
  if (first === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
    return { text: text[at + 1], length: 2 };
  }
  if (first === "`") return codeAt(text, at, unclosed);
  if (first === "[") return linkAt(text, at, depth, unclosed);
  if (first === "!" && text[at + 1] === "[") {
    // Images are not loaded, only linked.
    const link = linkAt(text, at + 1, depth, unclosed);
    return link && { ...link, length: link.length + 1 };
  }
  if (first === "h") return bareLinkAt(text, at);
  if ("*_~".includes(first)) return emphasisAt(text, at, depth, unclosed);
  return null;
}

function codeAt(text, at, unclosed) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const mark = "`".repeat(length);
  const end = unclosed.has(mark) ? -1 : text.indexOf(mark, at + length);
  if (end < 0) {
    unclosed.add(mark);
    return { text: mark, length };
  }
  const code = element("code", {}, text.slice(at + length, end));
  return { node: code, length: end + length - at };
}

function linkAt(text, at, depth, unclosed) {
  const next = text.indexOf("[", at + 1); // if it precedes `](`, the link starts there
  const label = text.slice(at + 1, next < 0 ? undefined : next).split("](", 1)[0];
  const middle = at + 1 + label.length;
  if (!text.startsWith("](", middle) || unclosed.has(")")) return null;
  const end = text.indexOf(")", middle);
  if (end < 0) {
    unclosed.add(")");
    return null;
  }
  const address = text.slice(middle + 2, end).trim().split(/\s/, 1)[0];
  const link = linkTo(address, inlines(label || address, depth + 1));
  return link && { node: link, length: end + 1 - at };
}

function bareLinkAt(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  URL_START.lastIndex = at;
  const found = URL_START.exec(text)?.[0] ?? "";
  let length = found.length;
  while (CLOSING.includes(found[length - 1])) length -= 1;
  const address = found.slice(0, length);
  const link = linkTo(address, [address]);
  return link && { node: link, length };
}

/** A link that opens in a new tab; null unless the address is an http, https or mailto URL. */
function linkTo(address, children) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !/^(https?|mailto):$/.test(url.protocol)) return null;
  const properties = { href: url.href, target: "_blank", rel: "noopener noreferrer" };
  return Object.assign(filled("a", children), properties);
}

function emphasisAt(text, at, depth, unclosed) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const start = at + mark.length;
    if (!canOpen(text, at, start, mark)) continue;
    const end = endOfMark(text, start, mark);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    const inner = inlines(text.slice(start, end), depth + 1);
    return { node: filled(tag, inner), length: end + mark.length - at };
  }
  return null;
}

function canOpen(text, at, start, mark) {
  if (/\s/.test(text[start] ?? " ") || text[start] === mark[0]) return false;
  return mark[0] !== "_" || !WORD.test(text[at - 1] ?? "");
}

/** The position of the mark that ends an emphasis: not after a space or within a longer run. */
function endOfMark(text, start, mark) {
  let end = text.indexOf(mark, start + 1);
  while (end >= 0) {
    const next = text[end + mark.length] ?? "";
    const isWithinRow = mark.length === 1 && (next === mark || text[end - 1] === mark);
    const isWithinWord = mark[0] === "_" && WORD.test(next);
    if (!/\s/.test(text[end - 1]) && !isWithinRow && !isWithinWord) return end;
    end = text.indexOf(mark, end + 1);
  }
  return -1;
}
