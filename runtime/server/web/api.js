// Calls to the server that this page came from, with the key that was asked for once.
import { ask } from "./dom.js";

const KEY = "dovetail-key";
// relative to the page, which may lie behind a prefix
const address = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

export class ApiError extends Error {}

let asking = null; // one dialog, however many calls wait for it

async function askKey() {
  asking ||= ask(
    "API key", "Key", "This server wants a key. It is kept in this tab until you close it.",
  ).finally(() => { asking = null; });
  const key = await asking;
  if (!key) throw new ApiError("the server wants an API key");
  sessionStorage.setItem(KEY, key.trim());
}

function headers(extra) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

/** Return the response of a call, of any status but 401: then the key is asked for. */
export async function send(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const type = body === undefined ? {} : { "content-type": "application/json" };
    const response = await fetch(address(path), { method, body, signal, headers: headers(type) });
    if (response.status !== 401) return response;
    sessionStorage.removeItem(KEY);
    await askKey();
  }
}

/** Return the response of a call that went well; else ApiError with what the server says. */
export async function call(path, options) {
  const response = await send(path, options);
  if (response.ok) return response;
  const text = await response.text();
  let said = text.slice(0, 500);
  try {
    said = JSON.parse(text).error.message;
  } catch { /* not in the envelope: from a proxy, say */ }
  throw new ApiError(said || `the server answered ${response.status}`);
}

/** Yield the JSON of each server-sent event of a call. */
export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ApiError(value.error.message);
    yield value;
  }
}

/** Yield the data of each event in a stream of bytes. */
export async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const text = line.endsWith("\r") ? line.slice(0, -1) : line;
        if (text.startsWith("data:")) data.push(text.slice(text[5] === " " ? 6 : 5));
        else if (!text && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
