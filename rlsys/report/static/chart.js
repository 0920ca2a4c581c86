// Line charts over steps. All charts of a page share a crosshair at the step under the pointer or chosen by arrow keys.

import { add, fitted, h, hideTip, showTip, svg, tipRows } from "./dom.js";
import { number, tickTexts } from "./format.js";

const MARGIN = { top: 8, right: 10, bottom: 20, left: 46 };
const drawn = new Set();
const MOST_TICKS = 50;
const SAME = 1e-9; // Relative difference below which values count as equal.

export function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999) ?? power;
  const from = Math.ceil(low / step - 1e-9), to = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, Math.min(MOST_TICKS, to - from + 1)) || 0 }, (_, place) => (from + place) * step || 0);
}

function decadeText(value) {
  return value > 1e-4 && value < 1e5 ? String(Number(value.toPrecision(1))) : value.toExponential(0).replace("e-", "e\u2212").replace("e+", "e");
}

function decades(low, high, most) {
  const from = Math.round(Math.log10(low)), to = Math.round(Math.log10(high)), every = Math.ceil((to - from) / most) || 1;
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, place) => 10 ** (from + place * every));
}

function domain(series, zero, log) {
  const values = series.flatMap((one) => one.points.map((point) => point[1])).filter(Number.isFinite);
  let low = Math.min(...values), high = Math.max(...values);
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
  if (zero || (low >= 0 && low < 0.5 * high)) low = Math.min(0, low);
  if (high - low <= SAME * Math.max(Math.abs(low), Math.abs(high))) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  return [low, high + (high - low) * 0.04];
}

// series: [{name, colour, points: [[step, value], ...], marks, thin}]
export function lineChart({ title, meaning = null, note, series, format = number, height = 150, zero = false, log = false, brief = false, xName = "step" }) {
  const lines = series
    .map((one) => ({ ...one, points: one.points.filter((point) => Number.isFinite(point[1]) && (!log || point[1] > 0)) }))
    .filter((one) => one.points.length);
  if (!lines.length) return null;
  // The height is set before drawing, so that redrawing the page keeps its scroll position.
  const box = h("div", { class: "plot", tabindex: 0, role: "img", id: `plot-${title.replace(/\W+/g, "-")}`, style: { "min-height": `${height}px` } });
  const latest = h("span", { class: "latest" }, lines.length === 1 ? format(lines[0].points.at(-1)[1]) : null);
  const figure = h("figure", { class: "chart" },
    h("figcaption", {}, h("b", { title: meaning }, title), latest, note && h("small", {}, note)),
    lines.length > 1 && legend(lines, format, brief), box);
  const ends = (one) => `${one.name ?? title}: ${format(one.points[0][1])} at ${xName} ${one.points[0][0]}, ${format(one.points.at(-1)[1])} at ${xName} ${one.points.at(-1)[0]}`;
  box.setAttribute("aria-label", `${title}. ${lines.map(ends).join("; ")}. Arrow keys read values.`);
  const chart = { box, lines, format, height, zero, log, title, xName, cursor: null };
  fitted(box, (width) => draw(chart, width));
  listen(chart);
  drawn.add(chart);
  return figure;
}

// `brief` hides the names, because the page explains the colours once.
function legend(lines, format, brief) {
  return h("ul", { class: "legend" }, lines.map((one) =>
    h("li", { title: one.name }, h("i", { class: "key", style: { background: one.colour } }), h("span", { class: brief ? "hidden" : null }, one.name), h("span", { class: "n" }, format(one.points.at(-1)[1])))));
}

function draw(chart, width) {
  if (width < 40) return;
  const { lines, height, format } = chart;
  const steps = lines.flatMap((one) => one.points.map((point) => point[0]));
  let left = Math.min(...steps), right = Math.max(...steps);
  if (left === right) [left, right] = [left - 1, right + 1];
  const [low, high] = domain(lines, chart.zero, chart.log);
  const x = (step) => MARGIN.left + ((step - left) / (right - left)) * (width - MARGIN.left - MARGIN.right);
  const part = chart.log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  const y = (value) => height - MARGIN.bottom - part(value) * (height - MARGIN.top - MARGIN.bottom);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const ticks = chart.log ? decades(low, high, 4) : niceTicks(low, high, 3), texts = chart.log ? ticks.map(decadeText) : tickTexts(ticks, format);
  for (const [place, tick] of ticks.entries())
    add(root, [svg("line", { class: tick === 0 ? "axis" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, texts[place])]);
  for (const tick of niceTicks(left, right, Math.max(1, Math.min(6, width / 60, right - left))).filter(Number.isInteger))
    add(root, svg("text", { class: "tick", x: x(tick), y: height - 5, "text-anchor": "middle" }, String(tick)));
  for (const one of lines) {
    const path = one.points.map(([step, value], place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    add(root, svg("path", { class: one.thin ? "curve thin" : "curve", d: path, stroke: one.colour }));
    if (one.marks || one.points.length < 16)
      add(root, one.points.map(([step, value]) => svg("circle", { cx: x(step), cy: y(value), r: one.thin ? 1.6 : 2.6, fill: one.colour })));
  }
  const cursor = svg("g", { class: "cursor", visibility: "hidden" });
  add(root, cursor);
  Object.assign(chart, { x, y, left, right, cursor, width, steps: [...new Set(steps)].sort((a, b) => a - b) });
  chart.box.replaceChildren(root);
}

function mark(chart, step) {
  if (!chart.cursor) return;
  chart.cursor.replaceChildren();
  chart.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
  if (step === null || step < chart.left || step > chart.right) return;
  add(chart.cursor, svg("line", { x1: chart.x(step), x2: chart.x(step), y1: MARGIN.top, y2: chart.height - MARGIN.bottom }));
  for (const one of chart.lines) {
    const found = one.points.find((point) => point[0] === step);
    if (found) add(chart.cursor, svg("circle", { cx: chart.x(step), cy: chart.y(found[1]), r: 3.5, fill: one.colour }));
  }
}

function markAll(step) {
  for (const chart of drawn) {
    if (chart.box.isConnected) mark(chart, step);
    else drawn.delete(chart);
  }
}

function read(chart, step, clientX, clientY) {
  chart.at = step;
  markAll(step);
  const rows = chart.lines.flatMap((one) => {
    const found = one.points.find((point) => point[0] === step);
    return found ? [[one.name ?? chart.title, chart.format(found[1]), one.colour]] : [];
  });
  showTip(clientX, clientY, tipRows(`${chart.xName} ${step}`, rows));
}

function listen(chart) {
  const leave = () => {
    hideTip();
    markAll(null);
  };
  chart.box.addEventListener("pointermove", (event) => {
    if (!chart.x) return;
    const at = event.clientX - chart.box.getBoundingClientRect().left;
    const nearest = chart.steps.reduce((best, step) => (Math.abs(chart.x(step) - at) < Math.abs(chart.x(best) - at) ? step : best));
    read(chart, nearest, event.clientX, event.clientY);
  });
  chart.box.addEventListener("pointerleave", leave);
  chart.box.addEventListener("blur", leave);
  chart.box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") leave();
    if (move === undefined || !chart.x) return;
    event.preventDefault();
    const now = chart.at === undefined ? (move > 0 ? -1 : chart.steps.length) : chart.steps.indexOf(chart.at);
    const step = chart.steps[Math.min(chart.steps.length - 1, Math.max(0, now + move))];
    const frame = chart.box.getBoundingClientRect();
    read(chart, step, frame.left + chart.x(step), frame.top + MARGIN.top);
  });
}

export function colourOf(number) {
  return `var(--s${number % 6})`;
}

// A run's colour and name, as the head of its row or column.
export function named(run, place) {
  return h("span", {}, h("i", { class: "key", style: { background: colourOf(place) } }), run.name);
}
