// The text of /metrics as numbers, and what two of them tell of the time between.

const LINE = /^[a-zA-Z_]\w*:(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One reading: samples by name, without the prefix of all. */
export class Reading {
  constructor(text, at) {
    this.at = at; // seconds
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = LINE.exec(line);
      if (!found) continue;
      const [, name, shown, value] = found;
      const labels = {};
      for (const [, key, said] of (shown || "").matchAll(LABEL)) {
        labels[key] = said.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
      }
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels, value: Number(value) });
    }
  }

  /** Return the samples of a name whose labels include these. */
  all(name, wanted = {}) {
    const pairs = Object.entries(wanted);
    const found = this.samples.get(name) || [];
    return found.filter(({ labels }) => pairs.every(([key, said]) => labels[key] === said));
  }

  has(name) {
    return this.samples.has(name);
  }

  sum(name, wanted) {
    return this.all(name, wanted).reduce((sum, { value }) => sum + value, 0);
  }

  /** Return the values that a label has. */
  values(name, label) {
    return [...new Set(this.all(name).map(({ labels }) => labels[label]))];
  }
}

/** Return how much a counter grew in a second; 0 where it began anew. */
export function rate(earlier, later, name, wanted) {
  if (!earlier || later.at <= earlier.at) return 0;
  const grown = later.sum(name, wanted) - earlier.sum(name, wanted);
  return Math.max(0, grown) / (later.at - earlier.at);
}

/** Return the mean of what a histogram saw between two readings; null where it saw nothing. */
export function mean(earlier, later, name, wanted) {
  const [sum, count] = ["sum", "count"].map(
    (part) => later.sum(`${name}_${part}`, wanted) - (earlier?.sum(`${name}_${part}`, wanted) || 0));
  return count > 0 ? sum / count : null;
}

/** Return a quantile of what a histogram saw between two readings, within its bounds; or null. */
export function quantile(earlier, later, name, part, wanted) {
  const bounds = new Map();
  for (const [reading, sign] of [[later, 1], [earlier, -1]]) {
    for (const { labels, value } of reading?.all(`${name}_bucket`, wanted) || []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      bounds.set(bound, (bounds.get(bound) || 0) + sign * value);
    }
  }
  const sorted = [...bounds].sort(([a], [b]) => a - b);
  const every = sorted.length ? sorted[sorted.length - 1][1] : 0;
  if (every <= 0) return null;
  let [below, lower] = [0, 0];
  for (const [bound, count] of sorted) {
    if (count >= part * every) {
      if (bound === Infinity) return lower;
      return lower + (bound - lower) * ((part * every - below) / Math.max(1, count - below));
    }
    [below, lower] = [count, bound];
  }
  return lower;
}
