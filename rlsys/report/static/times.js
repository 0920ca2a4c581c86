// Time breakdown: work and waits of each group, and the critical path of each step.

import { h, hideTip, readByKeys, showTip, table, tipRows } from "./dom.js";
import { plural, seconds, share, signed } from "./format.js";
import { shareBar, stackedBars } from "./bars.js";
import { changeSection, faultSection, faultsOf } from "./faults.js";
import { go, link, runOf } from "./state.js";

function colour(activity, waiting) {
  const own = `var(--a-${activity}, var(--a-other))`;
  return waiting ? `color-mix(in srgb, ${own} 42%, var(--card))` : own;
}

// Parts of a group's time: work, then waits, in the order of the report's activities.
function partsOf(report, use) {
  const names = Object.entries(report.activities);
  return [
    ...names.map(([name, words]) => ({ name: `working: ${words}`, value: use?.busy[name] ?? 0, colour: colour(name, false) })),
    ...names.map(([name, words]) => ({ name: `waiting for ${words}`, value: use?.waits[name] ?? 0, colour: colour(name, true) })),
  ];
}

export function causeBar(run, group) {
  const said = run.time.sentences.find((text) => text.includes(`The ${group} group`));
  return h("div", {}, said && h("p", {}, said), shareBar(partsOf(run.time, run.time.groups[group]), { label: `Time of the ${group} group`, format: seconds }));
}

export function times(all, now) {
  const run = all.runs[runOf(all, now)];
  const report = run.time;
  if (!report || !report.steps.length)
    return [h("p", { class: "note" }, "No time breakdown: timeline.jsonl is missing or has no step (older runs do not write it)."), planned(run), faultSection(run), changeSection(run)];
  const groups = Object.keys(report.groups);
  const group = groups.includes(now.group) ? now.group : groups.includes("actor") ? "actor" : groups[0];
  const at = Math.max(0, report.steps.findIndex((step) => String(step.step) === now.step));
  const bars = report.steps.map((step) => ({ label: String(step.step), title: `step ${step.step}, ${seconds(step.seconds)}`, parts: partsOf(report, step.groups[group]), marks: faultsOf(run, step.step) }));
  const choose = (name) => h("a", { id: `group-${name}`, href: link({ view: "time", group: name }, ["run", "step"]), "aria-current": name === group ? "true" : null }, name);
  return [
    h("section", {}, h("h2", {}, "Each group, all steps"), h("p", { class: "lede" }, report.sentences.at(-1)), eachGroup(report),
      h("p", { class: "soft" }, "Full colours are work. Pale colours are waiting, in the colour of the activity running meanwhile.")),
    planned(run),
    all.runs.length > 1 && sideBySide(all.runs, group),
    h("section", {}, h("h2", {}, "Each step of the ", h("span", { class: "choice", role: "group", "aria-label": "Group" }, groups.map(choose)), " group"),
      stackedBars({ bars, format: seconds, label: `Seconds of each step of the ${group} group, by work and waits`, selected: at, chosen: (place) => go({ view: "time", group, step: report.steps[place].step }) }), run.faults.length > 0 && h("p", { class: "soft" }, h("span", { class: "bad" }, "▼"), " marks a step in which something failed."), totals(report, group)),
    faultSection(run),
    changeSection(run),
    path(report, at, group),
  ];
}

// Prediction of `rlsys plan` beside what the run measured.
function planned(run) {
  if (!run.plan) return null;
  const measured = run.plan.seconds.some((row) => row.measured !== null);
  const rows = (list, format) => list.map((row) => [row.name, format(row.predicted), ...(measured ? [format(row.measured), row.measured === null ? "" : signed(row.predicted - row.measured, format)] : [])]);
  return h("section", {}, h("h2", {}, measured ? "Predicted and measured" : "Predicted"), run.plan.differs && h("p", { class: "lede" }, run.plan.differs),
    table(["", "predicted", ...(measured ? ["measured", "difference"] : [])], [...rows(run.plan.seconds, seconds), ...rows(run.plan.idle, share).map(([name, ...rest]) => [`${name}, idle`, ...rest])], { label: "Prediction of the plan" }),
    h("ul", { class: "soft" }, run.plan.notes.map((note) => h("li", {}, note))));
}

function eachGroup(report) {
  return h("div", { class: "lanes" }, Object.entries(report.groups).map(([name, use]) => {
    const total = [...Object.values(use.busy), ...Object.values(use.waits)].reduce((sum, one) => sum + one, 0);
    const busy = Object.values(use.busy).reduce((sum, one) => sum + one, 0);
    return [h("span", { class: "name" }, name), shareBar(partsOf(report, use), { label: `Time of the ${name} group`, format: seconds, keys: false }), h("span", { class: "n" }, total ? `${share(busy / total)} busy` : "")];
  }));
}

function sideBySide(runs, group) {
  const rows = runs.filter((run) => run.time?.groups[group]);
  return rows.length > 1 && h("section", {}, h("h2", {}, `The ${group} group in every run`), h("div", { class: "lanes" }, rows.map((run) => {
    const parts = partsOf(run.time, run.time.groups[group]);
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    return [h("span", { class: "name" }, run.name), shareBar(parts, { label: `Time of the ${group} group of ${run.name}`, format: seconds, keys: false }), h("span", { class: "n" }, `${seconds(total / run.time.steps.length)} per step`)];
  })));
}

function totals(report, group) {
  const use = report.groups[group];
  const total = partsOf(report, use).reduce((sum, part) => sum + part.value, 0);
  const rows = partsOf(report, use).filter((part) => part.value > 0).sort((a, b) => b.value - a.value)
    .map((part) => [h("span", {}, h("i", { class: "key", style: { background: part.colour } }), part.name), share(part.value / total), seconds(part.value), seconds(part.value / report.steps.length)]);
  return table(["", "share", "total", "per step"], rows, { label: `Time of the ${group} group` });
}

function path(report, at, group) {
  const step = report.steps[at];
  const words = (name) => report.activities[name] ?? name;
  const whole = Object.entries(step.path.seconds).map(([name, value]) => ({ name: words(name), value, colour: colour(name, false) }));
  const end = step.seconds;
  const links = step.path.links;
  const before = report.steps[at - 1], after = report.steps[at + 1];
  const to = (other, text) => other ? h("a", { id: text.replace(" ", "-"), href: link({ view: "time", group, step: other.step }) }, text) : h("span", { class: "soft" }, text);
  return h("section", {},
    h("h2", {}, `Critical path of step ${step.step}`),
    h("p", { class: "soft" }, to(before, "previous step"), " · ", to(after, "next step"), ` · ${seconds(end)}. Each part of the path waited for the one before; shortening a part shortens the step, other things being equal.`),
    shareBar(whole, { label: `Critical path of step ${step.step}`, format: seconds }),
    links.length ? pathList(step, links.map((one) => linkRow(one, end, words))) : h("p", { class: "note" }, "No critical path: the span that ends this step was not recorded."),
    h("p", { class: "soft" }, `${plural(links.length, "part")}, then ${seconds(step.path.rest_s)} until the step's end.`));
}

// A single Tab stop; arrow keys move from part to part and show the same tooltip as the pointer.
function pathList(step, rows) {
  const list = h("ol", { class: "path", id: "path", tabindex: 0, "aria-label": `Critical path of step ${step.step}. Arrow keys read its parts.` }, rows);
  const read = (place) => {
    for (const [number, row] of rows.entries()) row.classList.toggle("read", number === place);
    if (place === null) return hideTip();
    rows[place].scrollIntoView({ block: "nearest" });
    const frame = rows[place].getBoundingClientRect();
    rows[place].tell(frame.left + frame.width / 3, frame.bottom);
  };
  readByKeys(list, rows.length, read, () => read(null));
  return list;
}

function linkRow(one, end, words) {
  const parts = Object.entries(one.parts);
  const length = parts.reduce((sum, [, value]) => sum + value, 0);
  const rows = [...parts.map(([name, value]) => [words(name), seconds(value), colour(name, false)]), ["started at", seconds(one.start_s)], ...(one.waited_s > 0.0005 ? [["untraced gap before", seconds(one.waited_s)]] : []), ...(one.questions.length ? [["questions", `${one.questions.slice(0, 3).join(", ")}${one.questions.length > 3 ? ` and ${one.questions.length - 3} more` : ""}`]] : [])];
  const tell = (x, y) => showTip(x, y, tipRows(`${one.name} of ${one.group} ${one.lane}`, rows));
  const row = h("li", { onpointermove: (event) => tell(event.clientX, event.clientY), onpointerleave: hideTip },
    h("span", { class: "name" }, one.name, h("small", {}, ` ${one.group} ${one.lane === "main" ? "" : one.lane}`)),
    h("span", { class: "track" }, h("i", { class: "space", style: { width: `${(one.start_s / end) * 100}%` } }),
      parts.map(([name, value]) => h("i", { style: { width: `max(2px, ${(value / end) * 100}%)`, background: colour(name, false) } }))),
    h("span", { class: "n" }, seconds(length)));
  row.tell = tell;
  return row;
}
