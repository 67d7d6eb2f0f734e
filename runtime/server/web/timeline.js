// A recorded timeline: tracks of spans and counters in Chrome's trace format, with zoom. Needs no
// other file, so that reports carry it, too.

const ROW = 15;
const GAP = 8;
const LABEL = 124; // pixels at the left for the names of tracks
const AXIS = 20;
const COLOURS = ["#4e79a7", "#e08a2b", "#59a14f", "#b86fb0", "#d0605e", "#3f9b9b", "#a98b2d", "#8a7466"];
const FIRST = ["http", "submit", "workflows", "engine", "device", "CPU attention", "link", "encoder",
  "retrieval worker", "requests"]; // from top to bottom, where they were recorded
const PARTS = new Set(["schedule", "fill", "sample", "step"]); // of a step: drawn inside it

/** Return {spans, counters} of a trace; times in milliseconds. */
export function readTrace(trace) {
  const events = trace.traceEvents || [];
  const tracks = new Map();
  for (const event of events) {
    if (event.name === "thread_name") tracks.set(`${event.pid}/${event.tid}`, event.args.name);
  }
  const track = (event) => tracks.get(`${event.pid}/${event.tid}`) || `thread ${event.tid}`;
  const spans = [];
  const counters = new Map();
  const begun = new Map();
  for (const event of events) {
    const at = event.ts / 1000;
    const base = { track: track(event), name: event.name, start: at, args: event.args || {} };
    const key = `${event.pid}/${event.tid}/${event.id}`;
    if (event.ph === "X") spans.push({ ...base, end: at + event.dur / 1000 });
    else if (event.ph === "b") begun.set(key, base);
    else if (event.ph === "e" && begun.has(key)) {
      spans.push({ ...begun.get(key), end: at });
      begun.delete(key);
    } else if (event.ph === "C") {
      for (const [name, value] of Object.entries(event.args || {})) {
        const title = `${event.name}, ${name}`;
        if (!counters.has(title)) counters.set(title, []);
        counters.get(title).push([at, value]);
      }
    }
  }
  return { spans, counters };
}

/** Give each span a row of its track: spans that overlap lie below each other. */
export function packRows(spans) {
  const tracks = new Map();
  const places = new Map(FIRST.map((name, i) => [name, i]));
  const place = ({ track }) => places.get(track) ?? FIRST.length;
  for (const span of [...spans].sort((a, b) => place(a) - place(b))) {
    if (!tracks.has(span.track)) tracks.set(span.track, []);
    tracks.get(span.track).push(span);
  }
  for (const found of tracks.values()) {
    found.sort((a, b) => a.start - b.start || b.end - a.end);
    const ends = [];
    for (const span of found) {
      let row = ends.findIndex((end) => end <= span.start);
      if (row < 0) row = ends.length;
      ends[row] = span.end;
      span.row = row;
    }
    found.rows = ends.length;
  }
  return tracks;
}

export class TimelineView {
  constructor(box, trace) {
    const { spans, counters } = readTrace(trace);
    this.spans = spans;
    this.counters = counters;
    this.tracks = packRows(spans);
    const ends = [...spans.map((span) => span.end),
      ...[...counters.values()].flatMap((points) => points.map(([at]) => at))];
    this.length = Math.max(1e-3, ends.reduce((a, b) => Math.max(a, b), 0));
    [this.from, this.to] = [0, this.length];
    this.build(box);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.draw();
  }

  build(box) {
    const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
    const button = (text, label, act) => {
      const found = make("button", { type: "button", textContent: text, className: "quiet small" });
      found.setAttribute("aria-label", label);
      found.addEventListener("click", act);
      return found;
    };
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", this.describe());
    this.told = make("div", { className: "told" });
    this.told.setAttribute("role", "status");
    const tools = make("div", { className: "row" });
    tools.append(
      button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
      button("←", "Earlier", () => this.move(-0.25)), button("→", "Later", () => this.move(0.25)),
      button("All", "Show all", () => this.show(0, this.length)), this.told);
    const frame = make("div", { className: "timeline" });
    frame.append(tools, this.canvas);
    box.append(frame);
    this.listen();
  }

  describe() {
    const parts = [...this.tracks].map(([name, spans]) => `${name}: ${spans.length} spans`);
    return `Timeline of ${this.length.toFixed(1)} ms. ${parts.join(", ")}`;
  }

  listen() {
    const { canvas } = this;
    const keys = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      ArrowLeft: () => this.move(-0.1), ArrowRight: () => this.move(0.1),
      0: () => this.show(0, this.length), Home: () => this.show(0, this.length),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / 1000);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held == null) return this.tell(event.offsetX, event.offsetY);
      const moved = this.timeAt(held) - this.timeAt(event.offsetX);
      held = event.offsetX;
      return this.show(this.from + moved, this.to + moved);
    });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.33, this.timeAt(event.offsetX)));
  }

  // ---- the window ----

  timeAt(x) {
    const width = this.canvas.clientWidth - LABEL;
    return this.from + ((x - LABEL) / width) * (this.to - this.from);
  }

  show(from, to) {
    const span = Math.min(this.length, Math.max(to - from, this.length / 1e5));
    this.from = Math.max(0, Math.min(from, this.length - span));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(part) {
    const step = (this.to - this.from) * part;
    this.show(this.from + step, this.to + step);
  }

  // ---- the picture ----

  draw() {
    const { canvas } = this;
    const style = getComputedStyle(canvas);
    this.ink = style.color;
    const width = canvas.clientWidth;
    this.places = this.layOut();
    const height = this.places.height + AXIS;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(pen, width, height);
    let number = 0;
    for (const [name, spans] of this.tracks) this.drawTrack(pen, name, spans, width, number++);
    for (const [name, points] of this.counters) this.drawCounter(pen, name, points, width);
    canvas.dataset.from = this.from.toFixed(3);
    canvas.dataset.to = this.to.toFixed(3);
  }

  layOut() {
    const tops = new Map();
    let y = AXIS;
    for (const [name, spans] of this.tracks) {
      tops.set(name, y);
      y += spans.rows * ROW + GAP;
    }
    for (const name of this.counters.keys()) {
      tops.set(name, y);
      y += 2 * ROW + GAP;
    }
    return { tops, height: y };
  }

  x(at, width) {
    return LABEL + ((at - this.from) / (this.to - this.from)) * (width - LABEL);
  }

  drawAxis(pen, width, height) {
    const wanted = (this.to - this.from) / Math.max(2, (width - LABEL) / 90);
    const unit = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((part) => part * unit).find((found) => found >= wanted);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    pen.fillStyle = this.ink;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = this.x(at, width);
      pen.globalAlpha = 0.15;
      pen.fillRect(x, AXIS - 4, 1, height);
      pen.globalAlpha = 0.8;
      pen.fillText(`${at.toFixed(digits)} ms`, x + 3, 8);
    }
    pen.globalAlpha = 1;
  }

  label(pen, name, y) {
    pen.fillStyle = this.ink;
    pen.fillText(name.length > 20 ? `${name.slice(0, 19)}…` : name, 0, y + ROW / 2);
  }

  drawTrack(pen, name, spans, width, number) {
    const top = this.places.tops.get(name);
    this.label(pen, name, top);
    let filled = []; // the last pixel of each row: spans narrower than one are drawn once
    for (const span of spans) {
      if (span.end < this.from || span.start > this.to) continue;
      const left = Math.max(LABEL, this.x(span.start, width));
      const right = Math.min(width, Math.max(this.x(span.end, width), left + 1));
      if (right <= (filled[span.row] ?? -1)) continue;
      filled[span.row] = right;
      const y = top + span.row * ROW;
      pen.fillStyle = colourOf(span, number);
      pen.globalAlpha = PARTS.has(span.name) ? 0.55 : 0.9;
      pen.fillRect(left, y, Math.max(1, right - left - 0.5), ROW - 2);
      pen.globalAlpha = 1;
      if (right - left > 40) this.title(pen, span, left, right, y);
    }
  }

  title(pen, span, left, right, y) {
    pen.save();
    pen.beginPath();
    pen.rect(left, y, right - left - 2, ROW);
    pen.clip();
    pen.fillStyle = "#ffffff";
    pen.fillText(span.name, left + 3, y + ROW / 2 - 0.5);
    pen.restore();
  }

  drawCounter(pen, name, points, width) {
    const top = this.places.tops.get(name);
    this.label(pen, name, top);
    const most = points.reduce((a, [, value]) => Math.max(a, value), 1);
    pen.strokeStyle = COLOURS[0];
    pen.beginPath();
    let started = false;
    for (const [at, value] of points) {
      const x = Math.min(width, Math.max(LABEL, this.x(at, width)));
      const y = top + 2 * ROW - 2 - (value / most) * (2 * ROW - 4);
      if (started) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      started = true;
    }
    pen.stroke();
  }

  // ---- what lies under the pointer ----

  spanAt(x, y) {
    const at = this.timeAt(x);
    for (const [name, spans] of this.tracks) {
      const row = Math.floor((y - this.places.tops.get(name)) / ROW);
      if (row < 0 || row >= spans.rows) continue;
      const slack = (this.to - this.from) / this.canvas.clientWidth;
      const found = spans.find((span) => span.row === row
        && span.start - slack <= at && at <= span.end + slack);
      if (found) return found;
    }
    return null;
  }

  tell(x, y) {
    const span = this.spanAt(x, y);
    const args = span ? Object.entries(span.args).map(([key, value]) => `${key} ${value}`) : [];
    this.told.textContent = span
      ? [`${span.track}: ${span.name}`, `${(span.end - span.start).toFixed(3)} ms`, ...args].join(", ")
      : "";
  }
}

function colourOf(span, number) {
  if (span.name === "forward") {
    if (!span.args.prefill) return COLOURS[0];
    return span.args.decode ? COLOURS[3] : COLOURS[1];
  }
  return COLOURS[number % COLOURS.length];
}
