// Shows one trajectory token by token, coloured by a chosen value.

import { add, h, hideTip, showTip, table, tipRows } from "./dom.js";
import { number, plural, seconds, share, signed } from "./format.js";
import { trajectory } from "./data.js";
import { link, note } from "./state.js";
import { FINISHES, verdict } from "./words.js";

// name: [title, explanation, value of a token, value of full colour (null: the largest), format of the scale]
const COLOURINGS = {
  origin: ["who wrote it", "Plain text was sampled by the policy and is trained. Shaded text was given and is masked: observations and messages."],
  advantage: ["advantage", "Tokens that training makes more likely, and less.", (run, place) => at(run.advantage, place), null],
  ratio: ["ratio", "exp(old − engine log-prob): probability of the token by the trainer over that by the engine. Full colour at a factor of 1.1.", (run, place) => at(run.ratio, place), Math.log(1.1), (value) => "×" + Math.exp(value).toFixed(2)],
  surprise: ["log-prob", "Log-prob of the token when it was sampled. Full colour at a probability of 5 %.", (run, place) => at(run.sampled, place), Math.log(20), (value) => share(Math.exp(value))],
  kl: ["KL", "Log-prob minus the reference's: what the policy has learned to prefer. Full colour at 1 nat.", (run, place) => at(run.kl, place), 1],
  weight: ["weight", "Off-policy weight of the token, minus 1. Full colour at 0.5.", (run, place) => (at(run.weight, place) === null ? null : at(run.weight, place) - 1), 0.5],
  lag: ["staleness", "Weight versions between sampling and training of the token. Full colour at the oldest.", (run, place, row) => (run.version < 0 ? null : run.version - row.trained_version), null],
};

function at(figures, place) {
  return Array.isArray(figures) ? figures[place] : (figures ?? null);
}

export function reader(run, place, now) {
  const { columns, questions } = run.trajectories;
  const question = questions[columns.question[place]];
  const body = h("div", { class: "body", "aria-busy": "true" }, h("p", { class: "soft" }, "Unpacking …"));
  trajectory(run.trajectories, place).then(
    (row) => {
      body.replaceChildren();
      body.removeAttribute("aria-busy");
      if (row) add(body, inside(row, now));
      else add(body, h("p", { class: "note bad" }, "This trajectory is not in the data."));
    },
    (problem) => body.replaceChildren(h("p", { class: "note bad" }, `The trajectory could not be unpacked: ${problem.message}`)));
  const answer = columns.answer[place];
  return [
    h("h2", { class: "question" }, verdict(columns.right[place]), h("span", {}, question.text)),
    h("dl", { class: "pairs" },
      h("dt", {}, "answer"), h("dd", {}, answer === null ? h("i", {}, "nothing") : answer.trim() || h("i", {}, "an empty answer")),
      h("dt", {}, "accepted answers"), h("dd", {}, question.golden.join(" | "))),
    h("p", { class: "facts" }, [`step ${columns.step[place]}`, question.uid, question.source, `${FINISHES[columns.finish[place]] ?? columns.finish[place]} after ${plural(columns.searches[place], "search", "searches")}`, `${plural(columns.trained[place], "token")} trained of ${number(columns.length[place])}`, `reward ${number(columns.reward[place])}`, `advantage ${signed(columns.advantage[place])}`].filter(Boolean).join(" · ")),
    group(run, place),
    body,
  ];
}

// The samples of the same prompt group, with which the advantage compares this one.
function group(run, place) {
  const { columns } = run.trajectories;
  const others = [];
  for (let one = 0; one < columns.step.length; one++)
    if (columns.step[one] === columns.step[place] && columns.question[one] === columns.question[place]) others.push(one);
  return others.length > 1 && h("nav", { class: "samples", "aria-label": "Samples of this question in this step" }, h("span", { class: "soft" }, "prompt group"), others.map((one) =>
    h("a", { id: `sample-${one}`, href: link({ view: "trajectories", trajectory: one }, ["run", "colour"]), "aria-current": one === place ? "true" : null, title: `sample ${columns.sample[one]}: ${columns.answer[one] ?? "no answer"}, reward ${number(columns.reward[one])}` },
      verdict(columns.right[one]), number(columns.reward[one]))));
}

function inside(row, now) {
  const trained = row.runs.filter((run) => run.texts);
  const has = (name) => name === "origin" || trained.some((run) => run.texts.some((_, place) => (COLOURINGS[name][2](run, place, row) ?? 0) !== 0));
  const names = Object.keys(COLOURINGS).filter((name) => name in { origin: 1, advantage: 1, ratio: 1, surprise: 1 } || has(name));
  const text = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens. Arrow keys read the figures of one after the other." });
  const key = h("p", { class: "soft colourkey" });
  const spans = write(text, row);
  const paint = (name) => colour(spans, row, names.includes(name) ? name : "origin", key);
  const choose = h("fieldset", { class: "colours" }, h("legend", {}, "Colour by"), names.map((name) =>
    h("label", {}, h("input", { type: "radio", name: "colour", value: name, checked: name === (names.includes(now.colour) ? now.colour : "origin"), onchange: () => (note({ colour: name }), paint(name)) }), COLOURINGS[name][0])));
  paint(now.colour ?? "origin");
  listen(text, spans, row);
  return [choose, key, h("details", {}, h("summary", {}, `prompt, ${plural(row.prompt_length, "token")}`), h("pre", { class: "given" }, row.prompt)), text, turns(row), about(row)];
}

// Adds the response to `text`; returns its trained tokens as [{span, run, place}].
function write(text, row) {
  const spans = [];
  let turn = null;
  for (const run of row.runs) {
    if (!run.texts) {
      add(text, h("span", { class: "given", title: `${plural(run.count, "token")}, given and masked` }, run.text));
      continue;
    }
    if (run.turn !== turn && run.turn >= 0) add(text, h("span", { class: "turn" }, `turn ${run.turn + 1}`));
    turn = run.turn;
    for (const [place, piece] of run.texts.entries()) {
      const span = h("span", { class: "tok" }, piece);
      spans.push({ span, run, place });
      text.append(span);
    }
  }
  return spans;
}

function colour(spans, row, name, key) {
  const [title, what, of, full, format = signed] = COLOURINGS[name];
  const figures = spans.map(({ run, place }) => (of ? of(run, place, row) : null));
  const most = full ?? Math.max(1e-9, ...figures.map((one) => Math.abs(one ?? 0)));
  spans.forEach(({ span }, place) => {
    const one = figures[place];
    const strength = one === null ? 0 : Math.min(1, Math.abs(one) / most);
    span.classList.toggle("unknown", Boolean(of) && one === null);
    span.style.setProperty("background-color", strength > 0.01 ? `color-mix(in srgb, var(${one > 0 ? "--more" : "--less"}) ${Math.round(strength * 70)}%, transparent)` : "");
  });
  key.replaceChildren();
  const both = figures.some((one) => one > 0), below = figures.some((one) => one < 0);
  const none = figures.every((one) => !one);
  add(key, [what, of && !none && h("span", { class: "scale" },
    below && [h("span", {}, format(-most)), h("i", { class: "less", "aria-hidden": "true" })], h("span", {}, format(0)), both && [h("i", { class: "more", "aria-hidden": "true" }), h("span", {}, format(most))]),
    of && none && h("b", {}, " It is below 0.0001 or unknown for every token."),
    of && figures.includes(null) && " Dotted: unknown."]);
  key.setAttribute("aria-label", `${title}: ${what}`);
}

function facts({ run, place }, row) {
  const sampled = at(run.sampled, place), ratio = at(run.ratio, place), rows = [["token", `${run.ids[place]}`], ["turn", run.turn < 0 ? "none" : String(run.turn + 1)]];
  rows.push(["sampled by", run.version < 0 ? "nothing: it was added" : `version ${run.version}${row.trained_version > run.version ? `, staleness ${row.trained_version - run.version}` : ""}`]);
  rows.push(["engine log-prob", sampled === null ? "unknown" : `${number(sampled)} (${number(Math.exp(sampled) * 100)} %)`]);
  if (sampled !== null && ratio !== null) rows.push(["old log-prob", number(sampled + ratio)], ["ratio", Math.exp(ratio).toFixed(4)]);
  if (run.kl !== undefined) rows.push(["minus reference", signed(at(run.kl, place))]);
  rows.push(["advantage", signed(at(run.advantage, place))]);
  if (run.weight !== undefined) rows.push(["weight", number(at(run.weight, place))]);
  return rows;
}

function listen(text, spans, row) {
  const numbers = new Map(spans.map(({ span }, place) => [span, place]));
  let current = -1;
  const leave = () => {
    hideTip();
    spans[current]?.span.classList.remove("read");
  };
  const read = (place, x, y) => {
    spans[current]?.span.classList.remove("read");
    current = place;
    const { span, run } = spans[place];
    span.classList.add("read");
    const box = span.getClientRects()[0];
    showTip(x ?? box.left, y ?? box.bottom, tipRows(run.texts[spans[place].place].replaceAll("\n", "⏎").replaceAll(" ", "␣"), facts(spans[place], row)));
  };
  text.addEventListener("pointermove", (event) => numbers.has(event.target) ? read(numbers.get(event.target), event.clientX, event.clientY) : leave());
  text.addEventListener("pointerleave", leave);
  text.addEventListener("blur", leave);
  text.addEventListener("click", (event) => numbers.has(event.target) && read(numbers.get(event.target), event.clientX, event.clientY));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !spans.length) return;
    event.preventDefault();
    const next = Math.min(spans.length - 1, Math.max(0, current + move));
    spans[next].span.scrollIntoView({ block: "nearest" });
    read(next);
  });
}

function turns(row) {
  return row.turns.length > 0 && table(["turn", "action", "content", "tokens", "generation", "tool", "cached prompt tokens"], row.turns.map((one, place) => [
    String(place + 1), h("span", {}, one.tool || one.action), h("span", { class: "piece" }, one.content || "–", one.error && h("b", { class: "bad" }, ` ${one.error}`)), number(one.sampled), seconds(one.generate_s), one.search_s ? seconds(one.search_s) : "–", one.asked ? `${number(one.cached)} of ${number(one.asked)}` : "–"]), { label: "Turns", class: "turns" });
}

function about(row) {
  const rows = [...Object.entries(row.parts).map(([name, value]) => [`reward: ${name}`, number(value)]), ...Object.entries(row.extra)];
  return rows.length > 0 && h("details", {}, h("summary", {}, "reward and data"), table(null, rows, { label: "Reward and data", text: true }));
}
