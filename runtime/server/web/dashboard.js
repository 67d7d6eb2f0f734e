// The dashboard: what /metrics says, every other second while somebody looks.
import { call } from "./api.js";
import { Strip, show } from "./charts.js";
import { h } from "./dom.js";
import { Reading, mean, quantile, rate } from "./metrics.js";
import { TimelineView } from "./timeline.js";

const PERIOD = 2000; // milliseconds: a reading takes 7 of the server
const SPAN = 120; // seconds that are kept
const RECENT = 5; // seconds over which rates in figures are taken
const LEFT = { prompts: "engine busy with prompts", loss: "others would lose more", load: "too many generations",
  whole: "searches too short", gain: "nothing to gain" }; // reasons of transformations_left_total
const percent = (part) => `${(100 * part).toFixed(part && part < 0.1 ? 1 : 0)} %`;
const ms = (seconds) => (seconds == null ? "–" : seconds < 1
  ? `${show(seconds * 1000)} ms` : `${show(seconds)} s`);

export class Dashboard {
  constructor(box) {
    this.box = box;
    this.readings = [];
    this.shown = new Map(); // tables by title
    this.tiles = h("div.tiles");
    this.fault = h("p.error", { role: "alert", hidden: true });
    this.strips = {
      tokens: new Strip("Tokens per second", "", ["decode", "prefill"]),
      requests: new Strip("Requests", "", ["running", "waiting"]),
    };
    this.curves = h("div.strips", {}, Object.values(this.strips).map((strip) => strip.element));
    this.tables = h("div.tables");
    this.division = h("p.hint");
    this.record = h("button.primary", { type: "button", onclick: () => this.recordSome() },
      "Record 3 seconds");
    this.recorded = h("div.recorded");
    this.said = h("p.hint", {},
      "Requests, engine steps and searches as they happen; nothing is recorded unless you ask.");
    box.append(h("div.page", {}, this.fault, this.tiles,
      h("section", { "aria-label": "Last two minutes" }, h("h2", {}, "Last two minutes"),
        this.curves),
      this.tables, this.division,
      h("section", { "aria-label": "Timeline" }, h("div.row", {}, h("h2", {}, "Timeline"),
        this.record), this.said, this.recorded)));
    document.addEventListener("visibilitychange", () => this.watch(this.watching));
  }

  /** Read every PERIOD, or no longer. */
  watch(on) {
    this.watching = on;
    clearTimeout(this.timer);
    if (on && document.visibilityState === "visible") this.read();
  }

  async read() {
    clearTimeout(this.timer);
    try {
      const text = await (await call("metrics")).text();
      this.take(new Reading(text, performance.now() / 1000));
      this.fault.hidden = true;
    } catch (error) {
      this.fault.textContent = `No figures: ${error.message}`;
      this.fault.hidden = false;
    }
    if (this.watching && document.visibilityState === "visible") {
      this.timer = setTimeout(() => this.read(), PERIOD);
    }
  }

  take(now) {
    this.readings.push(now);
    while (now.at - this.readings[0].at > SPAN) this.readings.shift();
    this.now = now;
    this.before = this.readings.findLast((one) => one.at <= now.at - RECENT) || this.readings[0];
    this.oldest = this.readings[0];
    this.showTiles();
    this.showCurves();
    this.showTables();
    this.showDivision();
    this.box.dataset.readings = Number(this.box.dataset.readings || 0) + 1;
  }

  // ---- figures ----

  showTiles() {
    const { now, before } = this;
    const gauge = (label, name, labels, shown = show) => {
      const value = now.sum(name, labels);
      return tile(label, shown(value), { name, labels, value });
    };
    const tiles = [
      gauge("Running requests", "num_requests_running"),
      gauge("Waiting requests", "num_requests_waiting"),
      tile("Decode tokens/s", show(rate(before, now, "step_tokens_total", { phase: "decode" }))),
      tile("Prefill tokens/s", show(rate(before, now, "step_tokens_total", { phase: "prefill" }))),
    ];
    for (const device of now.values("kv_pool_usage_ratio", "device")) {
      const each = now.all("kv_pool_usage_ratio", { device });
      const part = each.reduce((sum, { value }) => sum + value, 0) / each.length;
      tiles.push(tile(`KV in use, ${device}`, percent(part),
        { name: "kv_pool_usage_ratio", labels: { device }, value: part }, part));
    }
    if (now.values("kv_pool_requests", "device").length > 1) {
      tiles.push(gauge("Offloaded to the CPU", "kv_pool_requests", { device: "cpu" }));
    }
    for (const device of now.values("embed_queue_texts", "device")) {
      const part = now.sum("embed_queue_usage_ratio", { device });
      tiles.push(gauge(`Texts to embed, ${device}`, "embed_queue_texts", { device }));
      tiles[tiles.length - 1].append(meter(part, `queue ${percent(part)} full`));
    }
    if (now.has("speculation_accept_ratio")) {
      const each = now.all("speculation_accept_ratio");
      const part = each.reduce((sum, { value }) => sum + value, 0) / each.length;
      tiles.push(tile("Guesses that held", percent(part),
        { name: "speculation_accept_ratio", labels: {}, value: part }, part));
    }
    const name = "transformations_left_total", guesses = { transformation: "speculate_generation" };
    for (const { labels, value } of now.all(name, guesses)) {
      const why = LEFT[labels.reason] ?? labels.reason;
      tiles.push(tile(`Nothing guessed: ${why}`, show(value), { name, labels, value }));
    }
    if (now.has("spec_decode_num_draft_tokens_total")) {
      const of = (name) => now.sum(`spec_decode_num_${name}_total`);
      const part = of("accepted_tokens") / Math.max(1, of("draft_tokens"));
      tiles.push(tile("Drafted tokens that held", percent(part),
        { name: "spec_decode_num_accepted_tokens_total", labels: {}, value: of("accepted_tokens") }, part));
    }
    tiles.push(tile("First token, median", ms(this.quantile("time_to_first_token_seconds", 0.5))));
    tiles.push(tile("Between tokens, median", ms(this.quantile("inter_token_latency_seconds", 0.5))));
    this.tiles.replaceChildren(...tiles);
  }

  quantile(name, part) {
    return quantile(this.oldest, this.now, name, part);
  }

  showCurves() {
    const { now, readings } = this;
    const pairs = readings.slice(1).map((later, i) => [readings[i], later]);
    const draw = (strip, values) => strip.draw(
      pairs.map(([earlier, later]) => [now.at - later.at, ...values(earlier, later)]), SPAN);
    draw(this.strips.tokens, (a, b) => ["decode", "prefill"].map(
      (phase) => rate(a, b, "step_tokens_total", { phase })));
    draw(this.strips.requests, (_, b) => [
      b.sum("num_requests_running"), b.sum("num_requests_waiting")]);
    const devices = now.values("kv_pool_usage_ratio", "device");
    if (devices.length) {
      const strip = this.strip("kv", () => new Strip("KV in use", " %", devices, { most: 100 }));
      draw(strip, (_, b) => devices.map((device) => 100 * b.sum("kv_pool_usage_ratio", { device })
        / Math.max(1, b.all("kv_pool_usage_ratio", { device }).length)));
    }
    const searching = now.values("retrieval_substage_seconds_count", "device");
    if (searching.length) {
      const strip = this.strip("search", () => new Strip("Search sub-stages per second", "", searching));
      draw(strip, (a, b) => searching.map(
        (device) => rate(a, b, "retrieval_substage_seconds_count", { device })));
    }
  }

  strip(name, make) {
    if (!this.strips[name]) {
      this.strips[name] = make();
      this.curves.append(this.strips[name].element);
    }
    return this.strips[name];
  }

  showTables() {
    const { now, before } = this;
    const plans = now.all("plan_info").map(({ labels }) => [
      labels.model_name, labels.phase, `${labels.processes} × ${labels.threads}`,
      labels.cpus || "any (unpinned)"]);
    const flows = now.values("workflow_runs_total", "workflow").map((workflow) => [
      workflow, show(now.sum("workflow_runs_total", { workflow })),
      show(rate(before, now, "workflow_runs_total", { workflow }))]);
    const nodes = now.values("workflow_latency_seconds_count", "workflow").flatMap((workflow) => {
      const names = now.all("workflow_latency_seconds_count", { workflow });
      return names.map(({ labels: { node } }) => [workflow, node,
        ms(mean(null, now, "workflow_latency_seconds", { workflow, node }))]);
    });
    const stages = now.values("retrieval_substage_seconds_count", "device").map((device) => [
      device, show(now.sum("retrieval_substage_seconds_count", { device })),
      show(rate(before, now, "retrieval_substage_seconds_count", { device })),
      ms(mean(this.oldest, now, "retrieval_substage_seconds", { device })
        ?? mean(null, now, "retrieval_substage_seconds", { device })),
      percent(rate(before, now, "retrieval_substage_seconds_sum", { device }))]);
    const pools = now.values("swapped_requests_total", "device").map((device) => [
      device, show(now.sum("kv_pool_requests", { device })),
      percent(now.sum("kv_pool_usage_ratio", { device })),
      show(now.sum("swapped_requests_total", { device }))]);
    const refused = now.all("admission_rejections_total").map(
      ({ labels, value }) => [labels.reason.replaceAll("_", " "), show(value)]);
    const shown = [
      ["Plan in force", ["Model", "Phase", ">Processes × threads", "PUs"], plans],
      ["KV by device", ["Device", ">Requests", ">In use", ">Moved here"],
        pools.length > 1 ? pools : []],
      ["Search sub-stages", ["Device", ">So far", ">Per second", ">Mean", ">Busy"], stages],
      ["Workflows", ["Workflow", ">Runs", ">Per second"], flows],
      ["Workflow nodes", ["Workflow", "Node", ">Mean time"], nodes],
      ["Refused requests", ["Reason", ">So far"], refused],
    ];
    for (const [title, columns, rows] of shown) this.table(title, columns, rows);
  }

  /** Tell in a line who keeps which part of the CPU, and how much of it works. */
  showDivision() {
    const { now, before } = this;
    const told = now.all("cpu_share_cores").map(({ labels: { model_name, stage }, value }) => {
      const busy = rate(before, now, "cpu_busy_seconds_total", { model_name, stage });
      return `${stage} ${show(busy)} of ${show(value)}`;
    });
    const changes = now.sum("cpu_divisions_total");
    this.division.textContent = told.length ? `Cores busy, of those kept (idle ones are lent): ${
      told.join(", ")}; divided anew ${show(changes)} times` : "";
  }

  /** Show a table; where it is there already only its cells change, so that focus stays. */
  table(title, columns, rows) {
    if (!rows.length && !this.shown.has(title)) return;
    if (!this.shown.has(title)) {
      const found = makeTable(title, columns);
      this.shown.set(title, found);
      this.tables.append(found.element);
    }
    const { body } = this.shown.get(title);
    while (body.rows.length > rows.length) body.lastChild.remove();
    rows.forEach((row, i) => {
      const line = body.rows[i] || body.insertRow();
      row.forEach((text, j) => {
        const cell = line.cells[j] || line.insertCell();
        if (columns[j][0] === ">") cell.className = "right";
        if (cell.textContent !== text) cell.textContent = text;
      });
    });
  }

  // ---- the timeline ----

  async recordSome() {
    this.record.disabled = true;
    this.said.textContent = "Recording…";
    try {
      const trace = await (await call("timeline?seconds=3")).json();
      this.recorded.replaceChildren();
      const view = new TimelineView(this.recorded, trace);
      this.said.textContent = view.spans.length
        ? "Drag to move, scroll or + and − to zoom, arrow keys to move."
        : "Nothing happened in these seconds: record while requests run.";
    } catch (error) {
      this.said.textContent = error.message;
    }
    this.record.disabled = false;
  }
}

/** A figure; `of`: the metric that it shows, for whoever compares. */
function tile(label, shown, of, part) {
  const value = h("div.value", {}, shown);
  if (of) {
    value.dataset.metric = of.name;
    value.dataset.labels = JSON.stringify(of.labels || {});
    value.dataset.value = of.value;
  }
  return h("div.tile", {}, h("div.label", {}, label), value, part != null && meter(part));
}

function meter(part, label) {
  const fill = h("i");
  fill.style.width = `${Math.min(100, 100 * part)}%`;
  return h("div.meter", label ? { title: label } : { "aria-hidden": true }, fill);
}

function makeTable(title, columns) {
  const head = columns.map((name) => h(
    name[0] === ">" ? "th.right" : "th", {}, name.replace(">", "")));
  const body = h("tbody");
  const element = h("section", { "aria-label": title }, h("h2", {}, title),
    h("div.wide", { tabIndex: 0, role: "region", "aria-label": title }, h("table", {},
      h("thead", {}, h("tr", {}, head)), body)));
  return { element, body };
}
