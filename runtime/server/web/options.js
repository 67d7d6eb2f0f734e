// The options of a chat: system prompt, sampling, tools. Empty fields stand for the model's own.
import { h } from "./dom.js";

const number = (label, name, step, least, most) => ({ label, name, step, least, most });
const NUMBERS = [
  number("Temperature", "temperature", "any", 0, 2),
  number("Top p", "top_p", "any", 0, 1),
  number("Top k", "top_k", 1, -1),
  number("Min p", "min_p", "any", 0, 1),
  number("Max tokens", "max_tokens", 1, 1),
  number("Seed", "seed", 1),
];
const KEPT = "dovetail-options";

export class Options {
  constructor(box, changed) {
    this.fields = new Map();
    this.kept = JSON.parse(sessionStorage.getItem(KEPT) || "{}");
    this.note = h("p.hint", { hidden: true }, "A workflow samples as its nodes say.");
    this.fault = h("p.error", { role: "alert", hidden: true });
    const all = [
      this.field("system", "System prompt", h("textarea", { rows: 4 })),
      h("div.pairs", {}, NUMBERS.map(({ label, name, step, least, most }) => this.field(
        name, label, h("input", { type: "number", step, min: least, max: most,
          placeholder: "default", inputMode: "decimal" })))),
      this.field("stop", "Stop at", h("input", { type: "text", placeholder: "a text" })),
      this.field("tools", "Tools (JSON list)", h("textarea.mono", {
        rows: 3, spellcheck: false, placeholder: '[{"type": "function", "function": {…}}]' })),
      this.field("more", "Further fields (JSON object)", h("textarea.mono", {
        rows: 2, spellcheck: false, placeholder: '{"presence_penalty": 0.5}' })),
    ];
    this.set = h("fieldset", {}, h("legend", {}, "Options"), this.note, all, this.fault,
      h("div.actions", {},
        h("button.quiet", { type: "button", onclick: () => this.reset() }, "Reset"),
        h("button.primary", { type: "button", onclick: () => changed(false) }, "Close")));
    box.append(this.set);
    this.changed = changed;
  }

  field(name, label, input) {
    input.name = name;
    input.value = this.kept[name] ?? "";
    input.addEventListener("input", () => this.keep());
    this.fields.set(name, input);
    return h("label.field", {}, label, input);
  }

  keep() {
    const values = [...this.fields].map(([name, input]) => [name, input.value]);
    this.kept = Object.fromEntries(values.filter(([, value]) => value));
    sessionStorage.setItem(KEPT, JSON.stringify(this.kept));
    this.fault.hidden = true;
  }

  reset() {
    for (const input of this.fields.values()) input.value = "";
    this.keep();
  }

  /** Have the options of a workflow or of a model. */
  serve(model) {
    const workflow = model.capabilities.includes("workflow");
    this.note.hidden = !workflow;
    for (const input of this.fields.values()) input.disabled = workflow;
  }

  /** Return the fields of a request; null where one is wrong, which is told beside them. */
  read() {
    const { system, stop, tools, more, ...numbers } = this.kept;
    try {
      return {
        ...(system ? { system } : {}),
        ...(stop ? { stop } : {}),
        ...(tools ? { tools: readJson(tools, "Tools") } : {}),
        ...Object.fromEntries(Object.entries(numbers).map(([name, text]) => [name, Number(text)])),
        ...(more ? readJson(more, "Further fields") : {}),
      };
    } catch (error) {
      this.fault.textContent = error.message;
      this.fault.hidden = false;
      this.changed(true);
      return null;
    }
  }
}

function readJson(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}
