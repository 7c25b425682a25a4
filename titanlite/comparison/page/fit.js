"use strict";
// Unpack and smooth the numbers to draw, and choose the limits of axes by the rule of axis.py.

function unpacked(text, kind) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const numbers = kind === "f8" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return Array.from(numbers, v => Number.isNaN(v) ? null : v);
}

// Average over about the last `span` steps, weighted by exp(-steps/span), without bias at the start. Nulls stay null.
function smoothed(steps, values, span) {
  if (!span) return values;
  let sum = 0, weight = 0, before = 0;
  return values.map((v, i) => {
    if (v === null) return null;
    const keep = Math.exp((before - steps[i]) / span);
    before = steps[i];
    sum = sum * keep + v * (1 - keep);
    weight = weight * keep + 1 - keep;
    return sum / weight;
  });
}

// The values of all lines at x from `left` to `right`, ascending.
function visible(lines, left, right) {
  return lines.flatMap(([x, y]) => y.filter((v, i) => v !== null && x[i] >= left && x[i] <= right)).sort((a, b) => a - b);
}

function fittedLimits(lines, left, right, end) {
  const after = right > 0.04 * end ? 0.02 * end : -Infinity, values = visible(lines, Math.max(left, after), right);
  if (!values.length) return [0, 1];
  let low = values[0], high = values.at(-1);
  if (values.length > 50) {
    const some = values[Math.floor(0.01 * (values.length - 1))], most = values[Math.floor(0.95 * (values.length - 1))];
    const room = 0.5 * (most - some);
    low = some - low <= room ? low : some;
    high = high - most <= room ? high : most;
  }
  return withMargin(low, high);
}

function fullLimits(lines, left, right) {
  const values = visible(lines, left, right);
  return values.length ? withMargin(values[0], values.at(-1)) : [0, 1];
}

function withMargin(low, high) {
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

// The index of the value nearest to x in ascending numbers.
function nearest(numbers, x) {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(numbers[low] - x) <= Math.abs(numbers[high] - x) ? low : high;
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function written(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (v !== 0 && (size < 1e-3 || size >= 1e6)) return v.toExponential(3).replace("-", "−");
  return v.toLocaleString("en", { minimumSignificantDigits: 5, maximumSignificantDigits: 5 }).replace("-", "−");
}

// The label of a tick, with as many digits as distinguish it from the next tick.
function tickText(v, step) {
  const power = Math.floor(Math.log10(step) + 1e-9), isHalf = Math.abs(step / 10 ** power - 2.5) < 1e-6;
  const digits = Math.max(0, isHalf - power);
  if (digits > 4 && v !== 0) return v.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(v)) + 1e-9) + digits)).replaceAll("-", "−");
  return Math.abs(v) >= 1e9 ? short.format(v) : v.toLocaleString("en", { minimumFractionDigits: Math.min(digits, 4), maximumFractionDigits: 4 }).replace("-", "−");
}

function duration(seconds) {
  for (const [size, unit] of [[86400, "days"], [3600, "h"], [60, "min"]])
    if (seconds >= size) return `${(seconds / size).toFixed(2)} ${unit}`;
  return `${seconds.toFixed(1)} s`;
}
