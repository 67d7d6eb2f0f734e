// The page: two views, the theme and the server's health.
import { send } from "./api.js";
import { setUpChat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { find, setUpTheme } from "./dom.js";

const VIEWS = ["chat", "dashboard"];
const dashboard = new Dashboard(find("dashboard"));

function show(name, focus = false) {
  for (const view of VIEWS) {
    const on = view === name;
    const tab = find(`tab-${view}`);
    find(view).hidden = !on;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    if (on && focus) tab.focus();
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  dashboard.watch(name === "dashboard");
  if (name === "chat" && matchMedia("(min-width: 48rem)").matches && !focus) find("prompt").focus();
}

for (const view of VIEWS) {
  find(`tab-${view}`).addEventListener("click", () => show(view));
  find(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length], true);
  });
}

const HEALTH = 10000; // milliseconds between two looks

async function showHealth() {
  const chip = find("health");
  let [kind, text, why] = ["ill", "unreachable", ""];
  try {
    const { status, reason } = await (await send("health")).json();
    [kind, text, why] = [status === "ok" ? "ok" : "ill", status === "ok" ? "ready" : status, reason];
  } catch { /* the server has gone, or a proxy answers */ }
  if (chip.textContent !== text) chip.textContent = text;
  chip.className = `health ${kind}`;
  chip.title = why || `The server is ${text}.`;
}

const wanted = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
addEventListener("hashchange", () => show(wanted()));
setUpTheme(find("theme"));
show(wanted());
setUpChat();
showHealth();
setInterval(() => document.visibilityState === "visible" && showHealth(), HEALTH);
