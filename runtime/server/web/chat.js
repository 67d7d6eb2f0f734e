// The chat: a conversation with any model or workflow of the server.
import { answer, toMessage } from "./answers.js";
import { call } from "./api.js";
import { download, find, h, say } from "./dom.js";
import { Options } from "./options.js";
import { TurnView } from "./turns.js";

const KEPT = "dovetail-chat";
const REFRESH = 40; // milliseconds between two views of a text that grows

let models = [];
let turns = [];
let running = null; // {controller, turn} of the answer that is being written
let options;
const views = new Map();

export async function setUpChat() {
  options = new Options(find("options"), toggleOptions);
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  find("stop").addEventListener("click", stop);
  find("new").addEventListener("click", startAnew);
  find("export-json").addEventListener("click", exportJson);
  find("export-markdown").addEventListener("click", exportMarkdown);
  find("options-button").addEventListener("click", () => toggleOptions());
  find("model").addEventListener("change", chooseModel);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  setUpPrompt(find("prompt"));
  try {
    turns = JSON.parse(sessionStorage.getItem(KEPT) || "[]");
  } catch {
    turns = [];
  }
  render();
  await loadModels();
}

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    const able = ["chat", "generate", "workflow"];
    models = data.filter((card) => able.some((name) => card.capabilities.includes(name)));
  } catch (error) {
    showEmpty(error.message);
    return;
  }
  const group = (label, found) => found.length
    && h("optgroup", { label }, found.map((card) => h("option", { value: card.id }, card.id)));
  const flows = models.filter((card) => card.capabilities.includes("workflow"));
  const others = models.filter((card) => !flows.includes(card));
  find("model").replaceChildren(
    ...[group("Models", others), group("Workflows", flows)].filter(Boolean));
  const kept = sessionStorage.getItem("dovetail-model");
  if (models.some((card) => card.id === kept)) find("model").value = kept;
  chooseModel();
}

const chosen = () => models.find((card) => card.id === find("model").value);

function chooseModel() {
  const model = chosen();
  if (!model) return showEmpty("This server has no model that generates.");
  sessionStorage.setItem("dovetail-model", model.id);
  options.serve(model);
  const further = (model.inputs || []).slice(1);
  find("inputs").replaceChildren(...further.map((name) => h(
    "label.field", {}, name, h("input", { type: "text", name }))));
  showEmpty();
  return undefined;
}

function setUpPrompt(prompt) {
  const grow = () => {
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 240)}px`;
  };
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  prompt.grow = grow;
}

// ---- what a user does ----

function submit() {
  const prompt = find("prompt");
  const content = prompt.value.trim();
  if (!content || running || !chosen()) return;
  prompt.value = "";
  prompt.grow();
  add({ role: "user", content });
  ask();
}

function edit(turn, content) {
  if (running || !content.trim()) return;
  cutFrom(turns.indexOf(turn));
  add({ role: "user", content });
  ask();
}

function regenerate(turn) {
  if (running) return;
  cutFrom(turns.indexOf(turn));
  ask();
}

function sendResult(asked, content) {
  add({ role: "tool", id: asked.id, name: asked.name, content });
  const results = new Set(turns.filter((turn) => turn.role === "tool").map((turn) => turn.id));
  const calls = turns.findLast((turn) => turn.calls?.length).calls;
  if (calls.every((one) => results.has(one.id))) ask();
}

function stop() {
  running?.controller.abort();
}

function startAnew() {
  stop();
  cutFrom(0);
  find("prompt").focus();
}

function toggleOptions(open = find("options").hidden) {
  find("options").hidden = !open;
  find("options-button").setAttribute("aria-expanded", String(open));
}

// ---- the conversation ----

const actions = { edit, regenerate, sendResult };

function add(turn) {
  for (const other of turns) other.last = false;
  turn.last = true;
  turns.push(turn);
  show(turn);
  keep();
}

function show(turn) {
  find("messages").querySelector(".empty")?.remove();
  const view = new TurnView(turn, actions);
  views.set(turn, view);
  find("messages").append(view.element);
  scrollDown(true);
}

function cutFrom(place) {
  for (const turn of turns.splice(place)) {
    views.get(turn)?.element.remove();
    views.delete(turn);
  }
  showEmpty();
  keep();
}

function render() {
  find("messages").replaceChildren();
  for (const turn of turns) {
    turn.busy = false;
    show(turn);
  }
  showEmpty();
}

function showEmpty(fault) {
  find("messages").querySelector(".empty")?.remove();
  if (turns.length) return;
  const model = chosen();
  const flow = model?.capabilities.includes("workflow");
  const what = model && (flow
    ? `Runs the workflow ${model.id} and shows its steps and sources.`
    : `${model.max_model_len.toLocaleString("en")} tokens of context.`);
  find("messages").append(h("div.empty", {},
    h("h2", {}, model ? `Ask ${model.id}` : "Connecting"),
    fault ? h("p.error", { role: "alert" }, fault) : what && h("p", {}, what)));
}

function keep() {
  const plain = turns.map(({ busy: _busy, ...turn }) => turn);
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(plain));
  } catch {
    sessionStorage.removeItem(KEPT); // too large: it ends with the page
  }
}

/** Keep the end in view, unless the reader has scrolled away from it. */
function scrollDown(always) {
  const box = find("scroll");
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 120;
  if (always || near) box.scrollTop = box.scrollHeight;
}

// ---- an answer ----

async function ask() {
  const fields = options.read();
  const model = chosen();
  if (!fields || !model) return;
  const asked = turns.slice();
  const turn = { role: "assistant", model: model.id, content: "", busy: true };
  add(turn);
  running = { controller: new AbortController(), turn };
  setBusy(true);
  const started = performance.now();
  const times = { first: null, tokens: 0 };
  try {
    const inputs = Object.fromEntries(new FormData(find("composer")));
    const { signal } = running.controller;
    for await (const event of answer(model, asked, fields, inputs, signal)) {
      if (event.text || event.reasoning) {
        times.first ??= (performance.now() - started) / 1000;
        times.last = (performance.now() - started) / 1000;
      }
      take(turn, event, times);
      refresh(turn);
    }
  } catch (error) {
    if (error.name === "AbortError") times.finish = "stopped";
    else turn.error = error.message || "the connection was lost";
  }
  const total = (performance.now() - started) / 1000;
  const rate = times.tokens > 1 ? (times.tokens - 1) / (times.last - times.first) : 0;
  turn.stats = { ...times, total, rate: Number.isFinite(rate) ? rate : 0 };
  turn.busy = false;
  running = null;
  setBusy(false);
  views.get(turn)?.update();
  scrollDown();
  keep();
  say(turn.error ? `Error: ${turn.error}` : "The answer is complete.");
}

function setBusy(busy) {
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  if (busy) say("The answer is being written.");
}

let due = 0;

function refresh(turn) {
  if (due) return;
  due = setTimeout(() => {
    due = 0;
    views.get(turn)?.update();
    scrollDown();
  }, REFRESH);
}

function take(turn, event, times) {
  if (event.text) turn.content += event.text;
  if (event.reasoning) turn.reasoning = (turn.reasoning || "") + event.reasoning;
  if (event.usage) times.tokens = event.usage.completion_tokens;
  if (event.finish) times.finish = event.finish;
  if (event.notes?.length) turn.notes = event.notes;
  if (event.call) takeCall(turn, event.call);
  takeStep(turn, event);
}

function takeCall(turn, delta) {
  turn.calls ||= [];
  const place = delta.index ?? turn.calls.length;
  turn.calls[place] ||= { id: "", name: "", arguments: "" };
  const found = turn.calls[place];
  if (delta.id) found.id = delta.id;
  if (delta.function?.name) found.name += delta.function.name;
  if (delta.function?.arguments) found.arguments += delta.function.arguments;
}

function takeStep(turn, { step, value, stage, done }) {
  turn.steps ||= [];
  const find_ = (id) => turn.steps.findLast((one) => one.id === id);
  if (step) {
    const { id, node, round, kind, at } = step;
    turn.steps.push({ id, node: String(node), round, kind, at });
  }
  if (value && find_(value.id)) find_(value.id).text = (find_(value.id).text || "") + value.text;
  if (stage) {
    const found = turn.steps.findLast((one) => one.node === String(stage.node));
    if (found) {
      found.stages ||= { count: 0, clusters: 0 };
      found.stages.count += 1;
      found.stages.clusters += stage.clusters;
    }
  }
  const ended = done && find_(done.id);
  if (ended) {
    ended.seconds = done.at - ended.at;
    if (["retrieval", "rerank"].includes(ended.kind) && Array.isArray(done.value)) takeSources(turn, done.value);
    else if (!ended.text) ended.text = clip(done.value);
  }
}

function takeSources(turn, found) {
  turn.sources ||= [];
  const known = new Set(turn.sources.map((source) => source.id));
  turn.sources.push(...found.filter((source) => source?.text && !known.has(source.id)));
}

function clip(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 400 ? `${text.slice(0, 400)} …` : text;
}

// ---- export ----

const stamp = () => new Date().toISOString().slice(0, 19).replaceAll(":", "-");

function exportJson() {
  const system = options.kept.system ? [{ role: "system", content: options.kept.system }] : [];
  const messages = [...system, ...turns.map(toMessage)];
  const text = JSON.stringify({ model: find("model").value, messages, turns }, null, 2);
  download(`chat-${stamp()}.json`, "application/json", text);
}

function exportMarkdown() {
  const names = { user: "You", tool: "Tool result" };
  const parts = turns.map((turn) => {
    const sources = (turn.sources || []).map((one, i) => `${i + 1}. ${one.title || one.id}: ${one.text}`);
    const after = sources.length ? `\n\nSources:\n\n${sources.join("\n")}` : "";
    return `## ${names[turn.role] || turn.model}\n\n${turn.content}${after}`;
  });
  download(`chat-${stamp()}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}
