// All kept trajectories: a list with filters, and beside it the open trajectory.

import { add, h } from "./dom.js";
import { number, plural, share, signed } from "./format.js";
import { chunk } from "./data.js";
import { link, note, runOf, state } from "./state.js";
import { reader } from "./reader.js";
import { FINISHES, pager, verdict } from "./words.js";

const PAGE = 50;
const SORTS = {
  step: ["in order", null],
  best: ["highest reward first", (columns, place) => -(columns.reward[place] ?? -Infinity) - (columns.advantage[place] ?? 0) / 1e3],
  worst: ["lowest reward first", (columns, place) => (columns.reward[place] ?? Infinity) + (columns.advantage[place] ?? 0) / 1e3],
  surprising: ["largest advantage first", (columns, place) => -Math.abs(columns.advantage[place] ?? 0)],
  drift: ["ratio furthest from 1 first", (columns, place) => -Math.abs(columns.log_ratio[place] ?? 0)],
  oldest: ["oldest tokens first", (columns, place) => -columns.lag[place]],
  longest: ["longest first", (columns, place) => -columns.length[place]],
  searches: ["most searches first", (columns, place) => -columns.searches[place]],
};
const FILTERS = ["q", "text", "from", "to", "right", "finish", "searches", "low", "high", "sort", "page"];
// List entry of a trajectory; hides the question if the entry above has the same.
export function card(run, place, { current = false, kept = ["run"], above } = {}) {
  const { columns, questions } = run.trajectories;
  const question = questions[columns.question[place]];
  const answer = columns.answer[place];
  return h("li", {}, h("a", { class: "card", id: `card-${place}`, href: link({ view: "trajectories", trajectory: place }, kept), "aria-current": current ? "true" : null },
    verdict(columns.right[place]),
    h("span", { class: "what" },
      h("span", { class: above !== undefined && columns.question[above] === columns.question[place] && columns.step[above] === columns.step[place] ? "hidden" : "asked" }, question.text),
      h("span", { class: "said" }, answer === null ? h("i", {}, "no answer") : answer.trim() || "an empty answer"),
      h("span", { class: "facts" }, `step ${columns.step[place]} · ${plural(columns.searches[place], "search", "searches")} · ${number(columns.trained[place])} tokens · reward ${number(columns.reward[place])}`,
        columns.advantage[place] !== null && ` · adv.\u00a0${signed(columns.advantage[place])}`,
        columns.finish[place] !== "answer" && h("b", { class: "bad" }, ` · ${FINISHES[columns.finish[place]] ?? columns.finish[place]}`),
        columns.errors[place] > 0 && h("b", { class: "bad" }, ` · ${plural(columns.errors[place], "failed search", "failed searches")}`)))));
}

export function trajectories(all, now) {
  const run = all.runs[runOf(all, now)];
  if (!run.trajectories) return h("p", { class: "note" }, "No trajectory was kept: tracking.trajectories sets how many are kept per step; older runs keep none.");
  const view = { run, results: h("ol", { class: "cards", id: "results" }), count: h("output", { role: "status" }), pages: h("div", { class: "pages" }), reading: h("article", { class: "reading", id: "reading", tabindex: -1, "aria-label": "Trajectory" }), found: [], texts: null };
  const chosen = now.trajectory === undefined ? null : Number(now.trajectory);
  refresh(view, now);
  if (chosen !== null && run.trajectories.columns.step[chosen] !== undefined) open(view, chosen, now);
  else if (chosen !== null) add(view.reading, h("p", { class: "note" }, `There is no trajectory ${now.trajectory} in this run.`));
  else add(view.reading, h("p", { class: "empty" }, "Choose a trajectory. Arrow keys, or j and k, move to the next and the previous one."));
  const split = h("div", { class: chosen === null ? "split" : "split open" },
    h("div", { class: "list" }, filters(view, now), h("p", { class: "counted" }, view.count), view.results, view.pages), view.reading);
  split.addEventListener("keydown", (event) => keys(view, event));
  split.addEventListener("click", (event) => keepColour(event.target.closest("a[href*='trajectory=']")));
  return split;
}

// Adds the current colouring, which may have changed since the link was made.
function keepColour(anchor) {
  const { colour } = state();
  if (!anchor || !colour) return;
  const params = new URLSearchParams(anchor.hash.slice(1));
  params.set("colour", colour);
  anchor.hash = params.toString();
}

function keys(view, event) {
  if (event.target.closest("input, select, .tokens") || event.ctrlKey || event.metaKey || event.altKey) return;
  const move = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (!move || (event.key.startsWith("Arrow") && event.target.closest(".reading"))) return;
  event.preventDefault();
  step(view, move);
}

function step(view, move) {
  const at = view.found.indexOf(Number(state().trajectory ?? -1));
  const next = view.found[at < 0 ? 0 : at + move];
  if (next === undefined) return;
  location.hash = link({ view: "trajectories", trajectory: next, page: Math.floor(view.found.indexOf(next) / PAGE) || null }, ["run", "colour", ...FILTERS]);
}

function open(view, place, now) {
  const at = view.found.indexOf(place);
  const go = (text, other, label) => other === undefined ? h("span", { class: "button off", "aria-hidden": "true" }, text)
    : h("a", { class: "button", id: label.split(" ")[0], "aria-label": label, href: link({ view: "trajectories", trajectory: other }, ["run", "colour", ...FILTERS]) }, text);
  const bar = h("div", { class: "bar" },
    h("a", { class: "button back", href: link({ view: "trajectories" }, ["run", "colour", ...FILTERS]) }, "‹ list"),
    at >= 0 && h("span", { class: "soft" }, `${number(at + 1)} of ${number(view.found.length)}`), go("‹", view.found[at - 1], "previous trajectory"), go("›", at < 0 ? undefined : view.found[at + 1], "next trajectory"));
  add(view.reading, [bar, reader(view.run, place, now)]);
}

function refresh(view, now) {
  const { columns } = view.run.trajectories;
  const wanted = matcher(view, now);
  view.found = [...columns.step.keys()].filter(wanted);
  const order = SORTS[now.sort]?.[1];
  if (order) view.found = view.found.map((place) => [order(columns, place), place]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, place]) => place);
  const right = view.found.reduce((sum, place) => sum + columns.right[place], 0);
  view.count.replaceChildren();
  add(view.count, [h("b", {}, number(view.found.length)), ` of ${plural(columns.step.length, "trajectory", "trajectories")}`, view.found.length > 0 && `, ${share(right / view.found.length)} right`, view.searching]);
  const pages = Math.max(1, Math.ceil(view.found.length / PAGE));
  const page = Math.min(pages - 1, Math.max(0, Number(now.page ?? 0) || 0));
  const chosen = Number(now.trajectory ?? -1);
  view.results.replaceChildren(...view.found.slice(page * PAGE, (page + 1) * PAGE).map((place, at, shown) => card(view.run, place, { current: place === chosen, kept: ["run", "colour", ...FILTERS], above: shown[at - 1] })));
  view.pages.replaceChildren();
  add(view.pages, pager(page, pages, (number) => turn(view, { page: number || null })));
}

function turn(view, changes) {
  note(changes);
  refresh(view, state());
}

function matcher(view, now) {
  const { columns, questions } = view.run.trajectories;
  const words = (now.q ?? "").toLowerCase().trim();
  const hit = questions.map((one) => !words || [one.uid, one.text, one.source, ...one.golden].some((text) => String(text ?? "").toLowerCase().includes(words)));
  const within = (value, low, high) => (low === undefined || value >= Number(low)) && (high === undefined || value <= Number(high));
  return (place) =>
    (hit[columns.question[place]] || (columns.answer[place] ?? "").toLowerCase().includes(words) || view.texts?.has(place)) &&
    within(columns.step[place], now.from, now.to) &&
    within(columns.reward[place], now.low, now.high) &&
    (now.right === undefined || columns.right[place] === Number(now.right)) &&
    (now.finish === undefined || columns.finish[place] === now.finish) &&
    (now.searches === undefined || columns.searches[place] === Number(now.searches));
}

// Searches all texts for the words; this unpacks every chunk once.
async function searchTexts(view, words) {
  const { chunks, first_chunk } = view.run.trajectories;
  const mine = (view.search = Symbol("search"));
  view.texts = new Set();
  view.results.setAttribute("aria-busy", "true");
  let before = 0;
  for (const [offset, [, , count]] of chunks.entries()) {
    const rows = await chunk(first_chunk + offset);
    if (view.search !== mine || !view.results.isConnected) return;
    rows.forEach((row, place) => textOf(row).toLowerCase().includes(words) && view.texts.add(before + place));
    before += count;
    if (offset % 8 === 7 || offset === chunks.length - 1) {
      view.searching = offset === chunks.length - 1 ? null : h("span", { class: "soft" }, ` · ${share((offset + 1) / chunks.length)} of the texts searched`);
      refresh(view, state());
    }
  }
  view.results.removeAttribute("aria-busy");
}

function textOf(row) {
  return row.runs.map((run) => run.text ?? run.texts.join("")).join("");
}

function filters(view, now) {
  const { columns } = view.run.trajectories;
  const steps = [columns.step[0], columns.step.at(-1)];
  const changed = (name) => (event) => {
    turn(view, { [name]: event.target.value, page: null });
    if (name === "q") again();
  };
  const again = () => {
    view.search = view.texts = view.searching = null;
    const words = (state().q ?? "").toLowerCase().trim();
    if (words && state().text) searchTexts(view, words);
    else refresh(view, state());
  };
  const choice = (name, label, options, wide) => h("label", { class: wide && "wide" }, label, pick(name, options, now[name], changed(name)));
  const bound = (name, label, hint) => h("input", { type: "number", id: `f-${name}`, step: "any", "aria-label": label, placeholder: hint, value: now[name] ?? "", oninput: changed(name) });
  const kinds = (values, words) => Object.fromEntries([["", "any"], ...[...new Set(values)].sort((a, b) => (a > b ? 1 : -1)).map((one) => [String(one), words?.[one] ?? String(one)])]);
  const form = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "wide" }, "Search", h("input", { type: "search", id: "f-q", placeholder: "question, answer, id", value: now.q ?? "", oninput: changed("q") })),
    h("label", { class: "check" }, h("input", { type: "checkbox", id: "f-text", checked: now.text !== undefined, onchange: (event) => (note({ text: event.target.checked ? "1" : null }), again()) }), "in all text"),
    choice("right", "Verdict", { "": "any", 1: "right", 0: "wrong" }),
    choice("finish", "Ended", kinds(columns.finish, FINISHES)),
    choice("searches", "Searches", kinds(columns.searches)),
    h("fieldset", {}, h("legend", {}, "Steps"), bound("from", "first step", steps[0]), "–", bound("to", "last step", steps[1])),
    h("fieldset", {}, h("legend", {}, "Reward"), bound("low", "lowest reward", "min"), "–", bound("high", "highest reward", "max")),
    choice("sort", "Order", Object.fromEntries(Object.entries(SORTS).map(([name, [label]]) => [name === "step" ? "" : name, label])), true),
    h("button", { type: "button", class: "plain", onclick: () => (location.hash = link({ view: "trajectories" })) }, "reset"));
  if (now.q && now.text) queueMicrotask(again);
  const folded = FILTERS.some((name) => name in now && !["q", "page"].includes(name));
  return innerWidth > 700 ? form : h("details", { class: "fold", open: folded }, h("summary", {}, "Search and filters"), form);
}

function pick(name, options, value, changed) {
  return h("select", { id: `f-${name}`, onchange: changed }, Object.entries(options).sort((a, b) => (a[0] === "" ? -1 : b[0] === "" ? 1 : 0))
    .map(([key, text]) => h("option", { value: key, selected: key === (value ?? "") }, text)));
}
