// Colours for code: comments, strings, numbers and words of common languages.
import { h } from "./dom.js";

const LONGEST = 30000;
const WORDS = new Set((
  "and as assert async await break case catch class const continue def default del do elif else "
  + "enum except export extends false False finally fn for from func function if impl import in "
  + "interface is lambda let loop match mod mut new nil None not null or package pass pub raise "
  + "return select self static struct super switch this throw trait true True try type typeof "
  + "use using var void where while with yield int float double char bool long unsigned string "
  + "SELECT FROM WHERE JOIN ON GROUP ORDER BY INSERT INTO UPDATE DELETE CREATE TABLE AND OR NOT "
  + "then fi done echo local"
).split(" "));
const HASH = "#[^\\n]*";
const SLASH = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
const DASH = "--[^\\n]*";
const COMMENTS = {
  ...Object.fromEntries("python py sh bash shell yaml yml toml ruby r dockerfile makefile".split(" ")
    .map((name) => [name, HASH])),
  ...Object.fromEntries(("js javascript ts typescript jsx tsx c cpp c++ h cc java go rust rs json "
    + "kotlin swift css cuda scala php c#").split(" ").map((name) => [name, SLASH])),
  sql: DASH, lua: DASH, haskell: DASH,
};

/** Return the nodes of a code's text; the plain text where the language is unknown. */
export function paint(text, language) {
  const comment = COMMENTS[language];
  if (!comment || text.length > LONGEST) return [text];
  const strings = '"""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?';
  const parts = new RegExp(`(${comment})|(${strings})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(parts)) {
    const [whole, isComment, isString, isNumber] = found;
    const kind = isComment ? "comment" : isString ? "text" : isNumber ? "number"
      : WORDS.has(whole) ? "word" : "";
    if (!kind) continue;
    nodes.push(text.slice(end, found.index), h(`span.c-${kind}`, {}, whole));
    end = found.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
