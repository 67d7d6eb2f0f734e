// Curves of the last minutes.
import { h, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [600, 84];

/** Curves over the same seconds; `series`: names with the number of their colour. */
export class Strip {
  constructor(title, unit, series, { most } = {}) {
    Object.assign(this, { title, unit, series, most });
    this.lines = series.map((_, i) => svg("path", { class: `line s${i + 1}`, fill: "none" }));
    this.areas = series.map((_, i) => svg("path", { class: `area s${i + 1}` }));
    this.values = series.map(() => h("b"));
    this.top = h("span.top");
    const legend = series.map((name, i) => h(
      "span.key", {}, h(`i.s${i + 1}`), `${name} `, this.values[i]));
    const grid = [0.5, HEIGHT / 2, HEIGHT - 0.5].map((y) => svg(
      "line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    }, grid, this.areas, this.lines);
    this.element = h("figure.strip", {},
      h("figcaption", {}, h("span.title", {}, title), h("span.keys", {}, legend)),
      h("div.plot", {}, this.top, this.picture));
  }

  /** Draw points [seconds before now, values...], of the last `span` seconds. */
  draw(points, span) {
    const most = this.most ?? niceTop(Math.max(...points.flatMap(([, ...values]) => values), 0));
    this.top.textContent = `${show(most)}${this.unit}`;
    const x = (ago) => (WIDTH * (span - ago)) / span;
    const y = (value) => HEIGHT - 1 - (Math.min(value, most) / most) * (HEIGHT - 4);
    this.series.forEach((_, i) => {
      const places = points.map(([ago, ...values]) => `${x(ago).toFixed(1)} ${y(values[i]).toFixed(1)}`);
      const line = places.length ? `M${places.join("L")}` : "";
      this.lines[i].setAttribute("d", line);
      const [first, last] = [points[0], points[points.length - 1]];
      this.areas[i].setAttribute("d", line
        && `${line}L${x(last[0]).toFixed(1)} ${HEIGHT}L${x(first[0]).toFixed(1)} ${HEIGHT}Z`);
      this.values[i].textContent = points.length
        ? `${show(points[points.length - 1][i + 1])}${this.unit}` : "";
    });
  }
}

/** Return the next round number above. */
export function niceTop(value) {
  if (value <= 1) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((part) => part * unit).find((top) => top >= value);
}

/** Return a number as people read it. */
export function show(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toPrecision(2).replace(/\.?0+$/, "");
}
