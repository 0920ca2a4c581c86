// Evaluations: accuracy on held-out questions, every answer, and changes since an earlier evaluation; also the results of
// `rlsys eval`.

import { add, h, table } from "./dom.js";
import { number, plural, share } from "./format.js";
import { named } from "./chart.js";
import { chunk } from "./data.js";
import { go, link, note, runOf, state } from "./state.js";
import { FINISHES, pager, verdict } from "./words.js";

const PAGE = 50;

export function evaluations(all, now) {
  const run = all.runs[runOf(all, now)];
  const chosen = run.evaluations.find((one) => String(one.step) === now.evaluation) ?? run.evaluations.at(-1);
  const several = all.runs.length > 1;
  return [
    several && lastOfEach(all.runs, run),
    chosen ? overTime(run, chosen, several) : h("p", { class: "note" }, "No evaluation yet, or the folder evaluations is missing."),
    measured(run),
    chosen && answers(run, chosen, now),
  ];
}

// [head, row => text] of the metrics that any row has.
function columnsOf(rows, sources) {
  const hops = [...new Set(rows.flatMap((one) => Object.keys(one.em_by_hop ?? {})))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const of = (key, name, format = share) => [name, (one) => (one[key] === undefined ? "–" : format(one[key]))];
  const figure = (key, name, format = share) => [name, (one) => (one.figures?.[key] === undefined ? "–" : format(one.figures[key]))];
  return [
    of("em", "EM"),
    ...hops.map((hop) => [`${hop}-hop`, (one) => share(one.em_by_hop?.[hop])]),
    ...sources.map((name) => [name.slice(3), (one) => share(one.figures?.[name])]),
    figure("f1", "F1"), figure("sub_em", "sub-EM"), of("finished", "finished"), of("searches", "searches", number), figure("tokens", "tokens", number), of("questions", "questions", number),
  ].filter(([, value]) => rows.some((one) => value(one) !== "–"));
}

function overTime(run, chosen, several) {
  const rows = run.reference ? [...run.evaluations, run.reference] : run.evaluations;
  const columns = columnsOf(rows, sourcesOf(run));
  const name = (one) => one === run.reference ? "reference policy" : h("a", { id: `evaluation-${one.step}`, href: link({ view: "evaluations", evaluation: one.step }), "aria-current": one === chosen ? "true" : null }, String(one.step));
  return h("section", {}, h("h2", {}, "Every evaluation", several && h("small", {}, ` of ${run.name}`)), table(["after step", ...columns.map(([head]) => head)], rows.map((one) => [name(one), ...columns.map(([, value]) => value(one))]), { label: "Evaluations" }));
}

function lastOfEach(runs, chosen) {
  if (!runs.some((run) => run.evaluations.length)) return null;
  const name = (run, place) => h("a", { id: `last-${place}`, href: link({ view: "evaluations", run: place }, []), "aria-current": run === chosen ? "true" : null }, named(run, place));
  const rows = runs.flatMap((run, place) => [[name(run, place), run.evaluations.at(-1) ?? {}], ...(run.reference ? [["its reference policy", run.reference]] : [])]);
  const columns = columnsOf(rows.map(([, one]) => one), [...new Set(runs.flatMap(sourcesOf))]);
  return h("section", {}, h("h2", {}, "The last evaluation of each run"), table(["", "after step", ...columns.map(([head]) => head)],
    rows.map(([named, one]) => [named, number(one.step), ...columns.map(([, value]) => value(one))]), { label: "The last evaluation of each run" }));
}

// Results of `rlsys eval` in the run folder: one row per folder and data set.
function measured(run) {
  const rows = run.measured;
  if (!rows.length) return null;
  const failed = rows.filter((one) => one.set !== null).reduce((sum, one) => sum + one.search_errors, 0);
  const tries = [...new Set(rows.flatMap((one) => Object.keys(one.pass_at)))].sort((a, b) => a - b);
  const asked = (one) => [one.engine, one.baseline !== "none" && one.baseline, one.samples > 1 && `${one.samples}\u00a0answers`, one.temperature > 0 && `temperature\u00a0${one.temperature}`].filter(Boolean).join(", ");
  const line = (one) => [
    one.folder, one.set === null ? h("b", {}, "average") : h("span", {}, one.set),
    number(one.questions), [share(one.em.mean), " ", h("small", { style: { display: "block" } }, `${share(one.em.low)} to ${share(one.em.high)}`)], share(one.f1.mean), share(one.sub_em.mean),
    ...tries.map((k) => share(one.pass_at[k]?.mean)), number(one.searches), h("span", {}, asked(one)), h("span", {}, one.model),
  ];
  return h("section", {}, h("h2", {}, "Measured by rlsys eval"),
    h("p", { class: "soft" }, `Results in the run's folder. EM (with its ${number(rows[0].level * 100)} % interval), F1 and sub-EM are for one answer per question;`,
      tries.length > 0 && " pass@k is the probability that at least one of k answers is right;", " the average weighs every set equally."),
    failed > 0 && h("p", { class: "bad" }, `${plural(failed, "search", "searches")} failed: these results do not reflect a fully working search.`),
    table(["folder", "set", "questions", "EM", "F1", "sub-EM", ...tries.map((k) => `pass@${k}`), "searches", "engine", "model"], rows.map(line), { label: "Measured by rlsys eval" }));
}

// Names of the metrics of single data sets, "em/<set>", if there are several sets.
export function sourcesOf(run) {
  const names = [...new Set(run.evaluations.flatMap((one) => Object.keys(one.figures ?? {})))].filter((name) => name.startsWith("em/"));
  return names.length > 1 ? names : [];
}

async function all(evaluation) {
  const parts = [];
  for (let place = 0; place < evaluation.chunks; place++) parts.push(...(await chunk(evaluation.first_chunk + place)));
  return parts;
}

function keyOf(one) {
  return `${one.set ?? ""} ${one.uid} ${one.sample ?? 0}`;
}

function answers(run, chosen, now) {
  const earlier = run.evaluations.filter((one) => one.step < chosen.step);
  const other = earlier.find((one) => String(one.step) === now.against) ?? earlier[0];
  const view = { rows: [], before: new Map(), since: other?.step, list: h("ol", { class: "answers" }), count: h("output", { role: "status" }), pages: h("div", { class: "pages" }) };
  const set = (changes) => {
    note(changes);
    refresh(view, state());
  };
  const pick = (name, label, options, reload) => h("label", {}, label, h("select", { id: `e-${name}`, onchange: (event) => (reload ? go({ [name]: event.target.value, page: null }, Object.keys(state())) : set({ [name]: event.target.value, page: null })) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(now[name] ?? options[0][0]) }, text))));
  const sets = h("span", {});
  const form = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "wide" }, "Search", h("input", { type: "search", id: "e-q", placeholder: "question, answer, text", value: now.q ?? "", oninput: (event) => set({ q: event.target.value, page: null }) })),
    pick("right", "Verdict", [["", "any"], ["1", "right"], ["0", "wrong"]]),
    earlier.length > 0 && pick("changed", "Changed", [["", "any"], ["up", "wrong before, right now"], ["down", "right before, wrong now"]]),
    earlier.length > 0 && pick("against", "Compared with", earlier.map((one) => [one.step, `step ${one.step}`]), true), sets);
  add(view.list, h("li", { class: "soft" }, "Unpacking …"));
  Promise.all([all(chosen), other ? all(other) : []]).then(
    ([rows, before]) => {
      view.rows = rows;
      view.before = new Map(before.map((one) => [keyOf(one), one]));
      refresh(view, state());
    },
    (problem) => view.list.replaceChildren(h("li", { class: "note bad" }, `The answers could not be unpacked: ${problem.message}`)));
  return h("section", {}, h("h2", {}, `Answers after step ${chosen.step}`), form, h("p", { class: "counted" }, view.count), view.list, view.pages);
}

function refresh(view, now) {
  const words = (now.q ?? "").toLowerCase().trim();
  const has = (one) => [one.uid, one.question, one.answer, one.response, ...(one.golden_answers ?? [])].some((text) => String(text ?? "").toLowerCase().includes(words));
  const turned = (one) => {
    const before = view.before.get(keyOf(one));
    if (!before || (before.em === 1) === (one.em === 1)) return "";
    return one.em === 1 ? "up" : "down";
  };
  const found = view.rows.filter((one) => (!now.right || (one.em === 1) === (now.right === "1")) && (!now.changed || view.since === undefined || turned(one) === now.changed) && (!words || has(one)));
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  const page = Math.min(pages - 1, Math.max(0, Number(now.page ?? 0) || 0));
  const ups = view.rows.filter((one) => turned(one) === "up").length, downs = view.rows.filter((one) => turned(one) === "down").length;
  view.count.replaceChildren();
  add(view.count, [h("b", {}, number(found.length)), ` of ${plural(view.rows.length, "answer")}`, view.before.size > 0 && ` · since step ${view.since}: ${number(ups)} became right, ${number(downs)} wrong`]);
  view.list.replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((one) => answer(one, view.before.get(keyOf(one)), turned(one), view.since)));
  view.pages.replaceChildren();
  add(view.pages, pager(page, pages, (next) => {
    note({ page: next || null });
    refresh(view, state());
  }));
}

function answer(one, before, turned, since) {
  const facts = [one.set, one.uid, plural(one.searches ?? 0, "search", "searches"), one.tokens !== undefined && plural(one.tokens, "token"), one.f1 !== undefined && one.em !== 1 && one.f1 > 0 && `F1 ${share(one.f1)}`].filter(Boolean).join(" · ");
  const said = (row) => (row.answer === null || row.answer === undefined ? h("i", {}, "no answer") : row.answer.trim() || h("i", {}, "an empty answer"));
  return h("li", {}, h("details", {}, h("summary", {}, verdict(one.em === 1), h("span", { class: "what" },
    h("span", { class: "asked" }, String(one.question ?? "").trim()),
    h("span", { class: "said" }, said(one), one.em !== 1 && h("span", { class: "soft" }, " instead of ", (one.golden_answers ?? []).join(" | ")), turned && h("span", { class: turned === "up" ? "turned right" : "turned wrong" }, turned === "up" ? "newly right" : "newly wrong")),
    h("span", { class: "facts" }, facts, one.finish !== "answer" && h("b", { class: "bad" }, ` · ${FINISHES[one.finish] ?? one.finish}`)))),
    h("pre", { class: "response" }, one.response ?? ""), before && h("p", { class: "soft" }, `after step ${since}: `, said(before))));
}
