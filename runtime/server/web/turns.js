// A turn of a conversation as elements, which follow it while it grows.
import { h } from "./dom.js";
import { makeLink, showMarkdown } from "./markdown.js";

const NAMES = { user: "You", tool: "Tool result" };

export class TurnView {
  /** `actions`: {edit, regenerate, sendResult}. */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    const name = NAMES[turn.role] || turn.model;
    this.thought = null;
    this.steps = new Map();
    this.calls = new Map();
    this.parts = h("div.parts");
    this.body = h("div.text");
    this.foot = h("div.foot");
    this.bar = h("div.under", {}, this.foot, this.buttons());
    this.element = h(
      `article.turn.${turn.role}`, { "aria-label": name },
      h("div.name", {}, turn.role === "tool" ? `${name}: ${turn.name}` : name),
      this.parts, this.body, this.bar);
    this.update();
  }

  buttons() {
    const button = (label, act) => h("button.quiet.small", { type: "button", onclick: act }, label);
    const { role } = this.turn;
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(this.turn.content);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    this.again = button("Regenerate", () => this.actions.regenerate(this.turn));
    return h("div.buttons", {}, copy,
      role === "user" && button("Edit", () => this.edit()),
      role === "assistant" && this.again);
  }

  edit() {
    const field = h("textarea", { value: this.turn.content, rows: 3, "aria-label": "Edit message" });
    const close = () => form.replaceWith(this.body);
    const form = h("form.edit", {
      onsubmit: (event) => {
        event.preventDefault();
        close();
        this.actions.edit(this.turn, field.value);
      },
    }, field, h("div.actions", {},
      h("button.quiet", { type: "button", onclick: close }, "Cancel"),
      h("button.primary", { type: "submit" }, "Send again")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    field.focus();
  }

  /** Show what has been added to the turn. */
  update() {
    const { turn } = this;
    if (turn.steps?.length) this.showSteps();
    if (turn.reasoning) this.showThought();
    for (const call of turn.calls || []) this.showCall(call);
    if (turn.role === "assistant") showMarkdown(this.body, turn.content);
    else this.body.textContent = turn.content;
    this.element.classList.toggle("busy", Boolean(turn.busy));
    this.element.setAttribute("aria-busy", String(Boolean(turn.busy)));
    this.bar.hidden = Boolean(turn.busy);
    if (!turn.busy) this.end();
  }

  end() {
    const { turn } = this;
    if (turn.sources?.length && !this.sources) {
      this.sources = showSources(turn.sources);
      this.body.after(this.sources);
    }
    for (const part of [this.thought, this.box]) if (part) part.open = false;
    this.foot.replaceChildren(...[
      turn.error && h("p.error", { role: "alert" }, turn.error),
      ...(turn.notes || []).map((note) => h("p.note", {}, note)),
      turn.stats && h("p.stats", {}, describe(turn)),
    ].filter(Boolean));
  }

  showThought() {
    if (!this.thought) {
      this.thinking = h("div.thinking");
      this.thought = h("details.card", { open: true }, h("summary", {}, "Thinking"), this.thinking);
      this.parts.append(this.thought);
    }
    showMarkdown(this.thinking, this.turn.reasoning);
  }

  showCall(call) {
    let shown = this.calls.get(call);
    if (!shown) {
      shown = { name: h("strong"), text: h("pre", { tabIndex: 0 }), answer: h("div") };
      const card = h("div.card.call", {}, h("div.head", {}, "Tool call ", shown.name), shown.text,
        shown.answer);
      this.parts.append(card);
      this.calls.set(call, shown);
    }
    shown.name.textContent = call.name;
    shown.text.textContent = pretty(call.arguments);
    if (!this.turn.busy && this.turn.last && !shown.answer.childElementCount) {
      const field = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}` });
      shown.answer.append(h("form", {
        onsubmit: (event) => {
          event.preventDefault();
          shown.answer.replaceChildren();
          this.actions.sendResult(call, field.value);
        },
      }, h("label.hint", {}, "Result, as the tool would return it"), field,
      h("div.actions", {}, h("button.primary", { type: "submit" }, "Send result"))));
    }
    if (!this.turn.last) shown.answer.replaceChildren();
  }

  showSteps() {
    if (!this.list) {
      this.list = h("ol.steps");
      this.summary = h("summary", {}, "Steps");
      this.box = h("details.card", { open: true }, this.summary, this.list);
      this.parts.append(this.box);
    }
    for (const step of this.turn.steps) {
      let shown = this.steps.get(step);
      if (!shown) {
        shown = { what: h("span"), time: h("span.time"), text: h("div.value") };
        shown.row = h("li", {}, h("span.mark"), shown.what, shown.time, shown.text);
        this.steps.set(step, shown);
        this.list.append(shown.row);
      }
      const loop = step.round ? ` (round ${step.round + 1})` : "";
      shown.row.className = step.seconds == null ? "running" : step.kind;
      shown.what.textContent = `${step.node}${loop}: ${step.kind}${describeStages(step.stages)}`;
      shown.time.textContent = step.seconds == null ? "" : milliseconds(step.seconds);
      shown.text.textContent = (step.text || "").trim();
    }
    const done = this.turn.steps.filter((step) => step.seconds != null).length;
    this.summary.textContent = `Steps: ${done} of ${this.turn.steps.length} done`;
    if (!this.turn.busy) this.summary.textContent = `${this.turn.steps.length} steps`;
  }
}

function describeStages(stages) {
  if (!stages) return "";
  const many = stages.count === 1 ? "sub-stage" : "sub-stages";
  return `, ${stages.clusters} clusters in ${stages.count} ${many}`;
}

function showSources(sources) {
  const rows = sources.map((source) => {
    const address = source.metadata?.url || source.metadata?.source || "";
    const title = source.title || source.metadata?.key || `document ${source.id}`;
    return h("li", {},
      h("strong", {}, makeLink(String(address), title)),
      source.score != null && h("span.time", {}, Number(source.score).toFixed(3)),
      h("p", {}, source.text));
  });
  const count = `${rows.length} ${rows.length === 1 ? "source" : "sources"}`;
  return h("details.card.sources", {}, h("summary", {}, count), h("ol", {}, rows));
}

function describe({ stats, model }) {
  const parts = [model];
  if (stats.tokens) parts.push(`${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
  if (stats.first != null) parts.push(`first after ${milliseconds(stats.first)}`);
  if (stats.total != null) parts.push(`${milliseconds(stats.total)} in all`);
  if (stats.finish === "length") parts.push("ended at the limit of tokens");
  if (stats.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

export function milliseconds(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
