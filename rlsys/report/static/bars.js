// Bars: a bar split into shares, stacked bars over steps, and histograms; readable by pointer and by arrow keys.

import { add, fitted, h, hideTip, readByKeys, showTip, svg, tipRows } from "./dom.js";
import { niceTicks } from "./chart.js";
import { number, share, tickTexts } from "./format.js";

const MARGIN = { top: 8, right: 10, bottom: 20, left: 46 };

// One bar with its legend below. parts: [{name, value, colour}]; shows `format(value)` and each share.
export function shareBar(parts, { label, format, keys = true }) {
  const shown = parts.filter((part) => part.value > 0);
  const total = shown.reduce((sum, part) => sum + part.value, 0);
  if (!total) return null;
  const text = shown.map((part) => `${part.name} ${share(part.value / total)}`).join(", ");
  const tell = (part, x, y) => showTip(x, y, tipRows(part.name, [[share(part.value / total), format(part.value), part.colour]]));
  const bar = h("div", { class: "sharebar", role: "img", "aria-label": `${label}: ${text}` },
    shown.map((part) => h("i", {
      style: { "flex-grow": part.value / total, background: part.colour },
      onpointermove: (event) => tell(part, event.clientX, event.clientY),
      onpointerleave: hideTip,
    }, part.value / total > 0.08 ? h("span", {}, share(part.value / total)) : null)));
  if (!keys) {
    // Without a legend, arrow keys read the values that the pointer shows.
    bar.tabIndex = 0;
    bar.id = `bar-${label.replace(/\W+/g, "-")}`;
    readByKeys(bar, shown.length, (place) => {
      const frame = bar.children[place].getBoundingClientRect();
      tell(shown[place], frame.left + frame.width / 2, frame.bottom);
    }, hideTip);
    return bar;
  }
  return h("div", {}, bar, h("ul", { class: "legend wide" }, shown.map((part) =>
    h("li", {}, h("i", { class: "key", style: { background: part.colour } }), part.name,
      h("span", { class: "n" }, `${share(part.value / total)} · ${format(part.value)}`)))));
}

// Bars side by side, in the given order: [{label, title, parts: [{name, value, colour}], marks: [text]}]; neighbours are
// averaged if there are more bars than fit, and a bar with marks has a triangle above it. A click or Enter calls `chosen(index)`.
export function stackedBars({ bars, format, height = 220, label, chosen, selected }) {
  if (!bars.length) return null;
  const box = h("div", { class: "plot", tabindex: 0, role: chosen ? "listbox" : "img", id: `plot-${label.replace(/\W+/g, "-")}`, style: { "min-height": `${height}px` },
    "aria-orientation": chosen && "horizontal", "aria-label": `${label}. Arrow keys read values${chosen ? ", Enter chooses" : ""}.` });
  const chart = { bars, format, height, chosen, selected, box, at: null };
  fitted(box, (width) => drawBars(chart, width));
  listen(chart);
  return box;
}

function together(bars, most) {
  const size = Math.ceil(bars.length / most);
  if (size <= 1) return bars.map((bar, place) => ({ ...bar, from: place }));
  const groups = [];
  for (let start = 0; start < bars.length; start += size) {
    const some = bars.slice(start, start + size);
    const parts = some[0].parts.map((part, place) => ({ ...part, value: some.reduce((sum, bar) => sum + bar.parts[place].value, 0) / some.length }));
    groups.push({ ...some[0], title: some.length > 1 ? `steps ${some[0].label} to ${some.at(-1).label}, mean` : some[0].title, parts, marks: some.flatMap((bar) => bar.marks ?? []), from: start, to: start + some.length });
  }
  return groups;
}

function drawBars(chart, width) {
  if (width < 40) return;
  const { height, format } = chart;
  const inner = width - MARGIN.left - MARGIN.right;
  const bars = together(chart.bars, Math.max(1, Math.floor(inner / 4)));
  const headroom = bars.some((bar) => bar.marks?.length) ? 1.1 : 1.03;
  const high = Math.max(...bars.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0))) * headroom || 1;
  const slot = inner / bars.length, thick = Math.max(1, Math.min(64, slot * (slot > 8 ? 0.8 : 1) - (slot > 3 ? 0.5 : 0)));
  const y = (value) => height - MARGIN.bottom - (value / high) * (height - MARGIN.top - MARGIN.bottom);
  const isSelected = (bar) => chart.selected !== undefined && chart.selected >= bar.from && chart.selected < (bar.to ?? bar.from + 1);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, ...(chart.chosen ? { role: "presentation" } : { "aria-hidden": "true" }) });
  const ticks = niceTicks(0, high, 4), texts = tickTexts(ticks, format);
  for (const [place, tick] of ticks.entries())
    add(root, svg("g", { "aria-hidden": "true" }, svg("line", { class: tick === 0 ? "axis" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, texts[place])));
  const every = Math.ceil(bars.length / Math.max(1, inner / 44));
  for (const [place, bar] of bars.entries()) {
    const left = MARGIN.left + slot * place + (slot - thick) / 2;
    let below = 0;
    const option = chart.chosen && { role: "option", id: `${chart.box.id}-${place}`, "aria-label": [bar.title, ...(bar.marks ?? [])].join(", "), "aria-selected": String(isSelected(bar)) };
    const group = svg("g", { class: isSelected(bar) ? "bar selected" : "bar", ...option });
    for (const part of bar.parts) {
      if (!(part.value > 0)) continue;
      add(group, svg("rect", { x: left, width: thick, y: y(below + part.value), height: Math.max(0, y(below) - y(below + part.value)), fill: part.colour }));
      below += part.value;
    }
    if (bar.marks?.length) add(group, svg("text", { class: "mark", x: left + thick / 2, y: y(below) - 3, "text-anchor": "middle" }, "▼"));
    if (place % every === 0) add(group, svg("text", { class: "tick", x: left + thick / 2, y: height - 5, "text-anchor": "middle" }, bar.label));
    add(root, group);
  }
  Object.assign(chart, { drawn: bars, slot, width });
  chart.box.replaceChildren(root);
}

function read(chart, place, x, y) {
  chart.at = place;
  if (chart.chosen) chart.box.setAttribute("aria-activedescendant", `${chart.box.id}-${place}`);
  const bar = chart.drawn[place];
  const total = bar.parts.reduce((sum, part) => sum + part.value, 0);
  const rows = bar.parts.filter((part) => part.value > 0).map((part) => [part.name, `${chart.format(part.value)} · ${share(part.value / total)}`, part.colour]);
  for (const text of bar.marks ?? []) rows.push([text, "▼"]);
  showTip(x, y, tipRows(bar.title, rows));
  for (const [number, group] of [...chart.box.querySelectorAll(".bar")].entries()) group.classList.toggle("read", number === place);
}

function listen(chart) {
  const leave = () => {
    hideTip();
    for (const group of chart.box.querySelectorAll(".read")) group.classList.remove("read");
  };
  const placeAt = (event) => {
    const at = event.clientX - chart.box.getBoundingClientRect().left - MARGIN.left;
    return Math.min(chart.drawn.length - 1, Math.max(0, Math.floor(at / chart.slot)));
  };
  chart.box.addEventListener("pointermove", (event) => chart.drawn && read(chart, placeAt(event), event.clientX, event.clientY));
  chart.box.addEventListener("pointerleave", leave);
  chart.box.addEventListener("blur", leave);
  if (chart.chosen) chart.box.classList.add("choosable");
  chart.box.addEventListener("click", (event) => chart.chosen?.(chart.drawn[placeAt(event)].from));
  chart.box.addEventListener("keydown", (event) => {
    if (!chart.drawn) return;
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && chart.at !== null) chart.chosen?.(chart.drawn[chart.at].from);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const now = chart.at ?? (move > 0 ? -1 : chart.drawn.length);
    const place = Math.min(chart.drawn.length - 1, Math.max(0, now + move));
    const frame = chart.box.getBoundingClientRect();
    read(chart, place, frame.left + MARGIN.left + chart.slot * (place + 0.5), frame.top + 20);
  });
}

// Horizontal bars with their names: [{name, value, colour, text}].
export function namedBars(rows, { format = number, label }) {
  const most = Math.max(...rows.map((row) => Math.abs(row.value)));
  if (!(most > 0)) return null;
  return h("ul", { class: "namedbars", "aria-label": label }, rows.map((row) =>
    h("li", {}, h("span", { class: "name" }, row.name),
      h("span", { class: "track" }, h("i", { style: { width: `${(Math.abs(row.value) / most) * 100}%`, background: row.colour ?? "var(--accent)" } })),
      h("span", { class: "n" }, row.text ?? format(row.value)))));
}
