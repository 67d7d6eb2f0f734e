// The API page: /openapi.json as a list of endpoints, each to read and to try.
import { call, send } from "./api.js";
import { find, h, setUpTheme } from "./dom.js";
import { renderInline } from "./markdown.js";

const EXAMPLES = {
  ChatRequest: { messages: [{ role: "user", content: "Hello" }], max_tokens: 32, stream: false },
  CompletionRequest: { prompt: "Once", max_tokens: 16 },
  EmbeddingRequest: { input: ["a text"] },
  RerankRequest: { query: "a question", documents: ["one text", "another"] },
  RunRequest: { inputs: { input: "a question" }, stream: false },
  TokenizeRequest: { prompt: "a text" },
  DetokenizeRequest: { tokens: [1, 2, 3] },
};
const LONGEST = 200000; // letters of a reply that are shown

let document_;

async function start() {
  setUpTheme(find("theme"));
  try {
    document_ = await (await call("openapi.json")).json();
  } catch (error) {
    find("page").append(h("p.error", { role: "alert" }, error.message));
    return;
  }
  const { info, paths } = document_;
  const endpoints = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods)
    .map(([method, operation]) => showEndpoint(method.toUpperCase(), path, operation)));
  find("page").append(
    h("p.hint", {}, `Version ${info.version}. Clients of OpenAI's API work with the address `,
      h("code", {}, new URL("v1", document.baseURI).href), "."),
    ...endpoints);
}

function showEndpoint(method, path, operation) {
  const inside = h("div.inside");
  const box = h("details.endpoint", { id: `${method} ${path}` },
    h("summary", {}, h("span.method", {}, method), h("span.path", {}, path)), inside);
  box.addEventListener("toggle", () => {
    if (box.open && !inside.childElementCount) inside.append(...describe(method, path, operation));
  });
  return box;
}

function describe(method, path, operation) {
  const body = operation.requestBody?.content["application/json"].schema;
  const done = operation.responses["200"].content;
  const reply = done["application/json"]?.schema;
  const parameters = operation.parameters || [];
  return [
    body && h("h3", {}, "Body"), body && showFields(body),
    reply && h("h3", {}, "Reply"), reply && showFields(reply),
    done["text/event-stream"] && h("p.hint", {}, "With ", h("code", {}, "stream: true"),
      " the reply comes as server-sent events."),
    h("h3", {}, "Try it"), tryForm(method, path, parameters, body),
  ].filter(Boolean);
}

// ---- schemas ----

function resolve(schema) {
  return schema.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function showFields(schema) {
  const { description, properties = {}, required = [] } = resolve(schema);
  const rows = Object.entries(properties).map(([name, kind]) => h("tr", {},
    h("td", {}, name, required.includes(name) && h("span", { title: "required" }, " *")),
    h("td", {}, describeKind(kind))));
  return h("div", {}, description && h("p.hint", {}, renderInline(description)),
    rows.length > 0 && h("div.wide", { tabIndex: 0, role: "region", "aria-label": "Fields" },
      h("table.fields", {}, h("thead", {}, h("tr", {}, h("th", {}, "Field"), h("th", {}, "Type"))),
        h("tbody", {}, rows))));
}

/** Return a schema in words. */
function describeKind(kind, depth = 0) {
  const many = kind.anyOf || kind.oneOf;
  if (many) return [...new Set(many.map((one) => describeKind(one, depth)))].join(" or ");
  if (kind.$ref) {
    const name = kind.$ref.split("/").pop();
    const { properties, enum: words } = resolve(kind);
    if (words) return words.map((word) => JSON.stringify(word)).join(" or ");
    if (!properties || depth > 1) return name;
    const inside = Object.entries(properties).map(
      ([key, one]) => `${key}: ${describeKind(one, depth + 1)}`);
    return `${name} {${inside.join(", ")}}`;
  }
  if (kind.enum) return kind.enum.map((word) => JSON.stringify(word)).join(" or ");
  if (kind.type === "array") return `list of ${kind.items ? describeKind(kind.items, depth) : "anything"}`;
  const least = kind.minimum ?? kind.exclusiveMinimum;
  const most = kind.maximum ?? kind.exclusiveMaximum;
  const told = (bound) => bound != null && Math.abs(bound) < 2 ** 30; // larger ones bind nobody
  const bounds = [told(least) && `≥ ${least}`, told(most) && `≤ ${most}`].filter(Boolean);
  const initial = kind.default != null && typeof kind.default !== "object"
    ? `, default ${JSON.stringify(kind.default)}` : "";
  return `${kind.type || "anything"}${bounds.length ? ` (${bounds.join(", ")})` : ""}${initial}`;
}

function exampleOf(schema) {
  const name = schema.$ref?.split("/").pop();
  if (EXAMPLES[name]) return EXAMPLES[name];
  const { properties = {}, required = [] } = resolve(schema);
  const plain = { string: "", integer: 1, number: 1, boolean: false, array: [], object: {} };
  return Object.fromEntries(required.map((key) => [key, plain[properties[key]?.type] ?? null]));
}

// ---- try it ----

function tryForm(method, path, parameters, body) {
  const text = body && h("textarea.mono", {
    rows: 6, spellcheck: false, value: JSON.stringify(exampleOf(body), null, 2) });
  const inputs = parameters.map((one) => [one, h("input", {
    type: "text", required: one.required, placeholder: one.required ? "" : "default" })]);
  const out = h("div");
  const go = h("button.primary", { type: "submit" }, "Send");
  const stop = h("button.quiet", { type: "button", hidden: true }, "Stop");
  return h("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      const controller = new AbortController();
      stop.onclick = () => controller.abort();
      [go.disabled, stop.hidden] = [true, false];
      const target = fillPath(path, inputs);
      await show(out, () => send(target, { method, body: text?.value, signal: controller.signal }));
      [go.disabled, stop.hidden] = [false, true];
    },
  }, inputs.map(([one, input]) => h("label.field", {}, `${one.name} (${one.in})`, input)),
  text && h("label.field", {}, "Body (JSON)", text),
  h("div.row", {}, go, stop), out);
}

function fillPath(path, inputs) {
  const query = new URLSearchParams();
  let filled = path;
  for (const [{ name, in: place }, { value }] of inputs) {
    if (place === "path") filled = filled.replace(`{${name}}`, encodeURIComponent(value));
    else if (value) query.set(name, value);
  }
  return query.size ? `${filled}?${query}` : filled;
}

/** Show a response as it comes. */
async function show(out, ask) {
  const head = h("div.head", {}, "Waiting…");
  const pre = h("pre", { tabIndex: 0 });
  out.replaceChildren(h("div.reply", { role: "status" }, head, pre));
  const started = performance.now();
  const told = () => `${Math.round(performance.now() - started)} ms`;
  try {
    const response = await ask();
    const json = (response.headers.get("content-type") || "").includes("json");
    const line = `${response.status} ${response.statusText}`;
    let text = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      head.textContent = `${line}, ${told()}`;
      if (!json) pre.textContent = text.slice(0, LONGEST);
    }
    if (json) pre.textContent = pretty(text).slice(0, LONGEST);
    head.textContent = `${line}, ${told()}`;
  } catch (error) {
    head.textContent = error.name === "AbortError" ? `stopped after ${told()}` : error.message;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

start();
