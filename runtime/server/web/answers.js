// What a model or a workflow answers, whatever endpoint it has, as one stream of small events:
// {text} {reasoning} {call} {step} {stage} {value} {done} {finish} {usage} {notes}.
import { stream } from "./api.js";

/** Yield the answer of `model`, a card of /v1/models, to turns. */
export function answer(model, turns, options, inputs, signal) {
  if (model.capabilities.includes("workflow")) return run(model, turns, inputs, signal);
  return (model.capabilities.includes("chat") ? chat : complete)(model, turns, options, signal);
}

/** Return a turn as a message of OpenAI's. */
export function toMessage(turn) {
  if (turn.role === "tool") {
    return { role: "tool", tool_call_id: turn.id, content: turn.content };
  }
  const message = { role: turn.role, content: turn.content };
  if (turn.calls?.length) {
    message.tool_calls = turn.calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

const shared = (model, { system: _system, ...fields }) => ({
  model: model.id, stream: true, stream_options: { include_usage: true }, ...fields,
});

async function* chat(model, turns, options, signal) {
  const before = options.system ? [{ role: "system", content: options.system }] : [];
  const messages = [...before, ...turns.filter((turn) => !turn.error).map(toMessage)];
  const body = { ...shared(model, options), messages };
  for await (const chunk of stream("v1/chat/completions", body, signal)) {
    const [choice] = chunk.choices;
    if (chunk.usage) yield { usage: chunk.usage };
    if (!choice) continue;
    const { delta } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) yield { reasoning: thought };
    if (delta.content) yield { text: delta.content };
    for (const call of delta.tool_calls || []) yield { call };
    if (choice.finish_reason) yield { finish: choice.finish_reason };
  }
}

async function* complete(model, turns, options, signal) {
  const { tools: _tools, ...fields } = options;
  const body = { ...shared(model, fields), prompt: turns.map((turn) => turn.content).join("") };
  for await (const chunk of stream("v1/completions", body, signal)) {
    const [choice] = chunk.choices;
    if (chunk.usage) yield { usage: chunk.usage };
    if (choice?.text) yield { text: choice.text };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
  }
}

async function* run(model, turns, inputs, signal) {
  const question = turns.findLast((turn) => turn.role === "user").content;
  const given = { ...inputs, [model.inputs[0]]: question };
  const path = `v1/workflows/${encodeURIComponent(model.id)}/runs`;
  let shown = "";
  let written = "";
  for await (const event of stream(path, { inputs: given, stream: true }, signal)) {
    const step = `${event.node}/${event.round ?? ""}`;
    if (event.type === "node_started") yield { step: { id: step, ...event } };
    if (event.type === "node_text") {
      yield { value: { id: step, text: event.text } };
      if (model.answers.includes(String(event.node))) {
        shown += event.text;
        yield { text: event.text };
      }
    }
    if (event.type === "sub_stage") yield { stage: event };
    if (event.type === "node_finished") {
      written = event.value;
      yield { done: { id: step, ...event } };
    }
    if (event.type === "run_finished") {
      if (!shown) yield { text: typeof written === "string" ? written : asJson(written) };
      yield { notes: event.notes, finish: "stop", seconds: event.seconds };
    }
  }
}

/** Return what the last node wrote, where it is no text. */
const asJson = (value) => `\`\`\`json\n${JSON.stringify(value, null, 2)}\n\`\`\``;
