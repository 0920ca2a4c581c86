// Every metric over all steps, grouped by the first part of its name.

import { h } from "./dom.js";
import { formatOf, plural } from "./format.js";
import { colourOf, lineChart } from "./chart.js";
import { note } from "./state.js";

export function pointsOf(run, name) {
  const values = run.metrics[name];
  return values ? run.steps.map((step, place) => [step, values[place]]) : [];
}

// Unit and meaning of a metric; empty for a run of an older rlsys.
export function explained(runs, name) {
  return runs.find((run) => Object.hasOwn(run.units, name))?.units[name] ?? ["", ""];
}

export function curveOf(runs, name, extra = {}) {
  const series = runs.map((run, number) => ({ name: runs.length > 1 ? run.name : null, colour: colourOf(number), points: pointsOf(run, name) }));
  const [unit, meaning] = explained(runs, name);
  return lineChart({ title: name, meaning: [meaning, unit && `[${unit}]`].filter(Boolean).join(" ") || null, series, format: formatOf(unit), brief: true, ...extra });
}

export function curves(all, now) {
  const names = [...new Set(all.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  if (!names.length) return h("p", { class: "note" }, "No step is recorded yet.");
  const found = h("div", {});
  const count = h("output", { class: "soft" });
  const draw = (text) => {
    const wanted = names.filter((name) => text.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word)));
    count.textContent = plural(wanted.length, "metric");
    found.replaceChildren();
    for (const [part, some] of Object.entries(Object.groupBy(wanted, (name) => name.split("/")[0]))) {
      const grid = h("div", { class: "charts dense" });
      const fold = h("details", { open: text !== "" || part !== "engine" }, h("summary", {}, h("h2", {}, part), h("small", {}, plural(some.length, "metric"))), grid);
      const fill = () => grid.childElementCount || grid.append(...some.map((name) => curveOf(all.runs, name, { height: 120 })).filter(Boolean));
      fold.addEventListener("toggle", () => fold.open && fill());
      if (fold.open) fill();
      found.append(fold);
    }
  };
  const search = h("input", {
    type: "search", id: "figure", placeholder: "entropy, idle, kl …", "aria-label": "Metrics whose name contains", value: now.figure ?? "",
    oninput: (event) => {
      note({ figure: event.target.value });
      draw(event.target.value);
    },
  });
  draw(now.figure ?? "");
  return [h("div", { class: "filters" }, h("label", {}, "Metrics", search), count), found];
}
