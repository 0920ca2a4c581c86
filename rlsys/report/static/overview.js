// Overview: key numbers, the most telling curves, and trajectories to look at.

import { h, table } from "./dom.js";
import { date, first, formatOf, last, mean, number, plural, seconds, share, signed, weighted } from "./format.js";
import { colourOf, lineChart, named } from "./chart.js";
import { explained, pointsOf } from "./curves.js";
import { causeBar } from "./times.js";
import { sampledTokens } from "./tokens.js";
import { card } from "./trajectories.js";
import { sourcesOf } from "./evaluations.js";
import { faultSentence } from "./faults.js";
import { link, runOf } from "./state.js";

// `Cause` in rlsys/rollout/agent/conversation_tree.py.
const CAUSES = ["first", "forked", "resampled", "tools", "system", "template", "edited", "compacted", "new_conversation"];

// [title, note, metrics drawn if present (with several runs only the first), their labels]
const CHARTS = [
  ["Reward", "of the episodes trained on", ["critic/score/mean", "reward/exact_match"], ["reward", "exact match"]],
  ["Policy loss", null, ["actor/policy_loss"]],
  ["Entropy", "nats per token", ["actor/entropy"]],
  ["KL to the reference", "nats per token, k3 estimate before the step's updates", ["kl/k3"]],
  ["Response length", "tokens, observations included", ["response_length/mean"]],
  ["Searches", "per episode", ["env/number_of_valid_search"]],
  ["Branches", "per episode, of an agent behind the gateway", ["gateway/branches/mean"]],
  ["Tokens by branch", "trained tokens, by the reason why their branch began", CAUSES.map((cause) => `gateway/tokens/${cause}`), CAUSES.map((cause) => cause.replace("_", " "))],
  ["Gradient norm", "before clipping", ["actor/grad_norm"]],
  ["Clipped tokens", "share of tokens without gradient because of the ratio clip", ["actor/clip_fraction"]],
  ["Seconds per step", "wall time", ["time/step"]],
  ["Generated tokens per second", "over the step", ["rollout/tokens_per_s"]],
  ["Staleness", "mean versions between sampling and training", ["staleness/mean"]],
  ["Finished with an answer", "share of episodes", ["env/finish_ratio"]],
];

const MOST = 12; // Charts; fills rows of two, three or four.
const FOLDED = 12; // More settings than this are folded.

export function overview(all, now) {
  const chosen = runOf(all, now);
  const run = all.runs[chosen];
  return [
    all.runs.length === 1 && [sentence(run), tiles(run)],
    problems(all.runs),
    h("section", {}, h("div", { class: "charts" }, [emChart(all.runs), ...CHARTS.map((chart) => chartOf(all.runs, chart))].filter(Boolean).slice(0, MOST))),
    all.runs.length > 1 && compared(all.runs),
    run.time && h("section", {}, h("h2", {}, "Where the time went", ofRun(all, run)), causeBar(run, "actor" in run.time.groups ? "actor" : Object.keys(run.time.groups)[0]),
      h("p", {}, h("a", { href: link({ view: "time" }) }, "Time of every group and step, and the critical path"))),
    run.trajectories && look(run, ofRun(all, run)),
  ];
}

function ofRun(all, run) {
  return all.runs.length > 1 && h("small", {}, ` in ${run.name}`);
}

function sentence(run) {
  const before = run.evaluations[0], after = run.evaluations.at(-1);
  const parts = [];
  if (before && after && before !== after)
    parts.push("Exact match on ", h("b", {}, plural(after.questions, "held-out question")), " went from ", h("b", {}, share(before.em)), " to ", h("b", {}, share(after.em)), ` in ${plural(after.step - before.step, "step")}. `);
  else if (after) parts.push("Exact match on ", plural(after.questions, "held-out question"), " was ", h("b", {}, share(after.em)), ` after ${plural(after.step, "step")}. `);
  const spent = (run.metrics["time/step"] ?? []).reduce((sum, one) => sum + (one ?? 0), 0);
  if (spent) parts.push(`Steps took ${seconds(spent)}. `);
  const alarms = Object.entries(run.metrics).filter(([name, values]) => name.startsWith("guard/") && values.some((one) => one > 0));
  for (const [name, values] of alarms)
    parts.push(h("b", { class: "bad" }, `Guard alarm: ${name.slice(6).replaceAll("_", " ")}, first at step ${run.steps[values.findIndex((one) => one > 0)]}. `));
  const faults = faultSentence(run);
  if (faults) parts.push(h("a", { href: link({ view: "time" }) }, faults), ". ");
  return h("p", { class: "lede" }, parts.length ? parts : "No step is recorded yet.");
}

// Mean over all steps; a step's rate or share is weighted by the step's duration.
function throughput(run) {
  return weighted(run.metrics["rollout/tokens_per_s"], run.metrics["time/step"]);
}

function atWork(run) {
  const idle = weighted(run.metrics["idle/actor"], run.metrics["time/step"]);
  return idle === null ? null : 1 - idle;
}

function tiles(run) {
  const of = (name) => run.metrics[name];
  const change = (values, format) => (values && first(values) !== last(values) ? `${signed(last(values) - first(values), format)} since step ${run.steps[values.indexOf(first(values))]}` : null);
  const before = run.evaluations[0], after = run.evaluations.at(-1);
  const points = (value) => number(Math.round(value * 1000) / 10) + " points";
  const shown = [
    after && ["Exact match", share(after.em), before !== after ? `${signed(after.em - before.em, points)} since step ${before.step}` : `step ${after.step}`],
    of("critic/score/mean") && ["Reward", number(last(of("critic/score/mean"))), change(of("critic/score/mean"), number)],
    after?.searches !== undefined && ["Searches per question", number(after.searches), before !== after ? `${number(before.searches)} before` : null],
    of("time/step") && ["Time per step", seconds(mean(of("time/step"))), `mean of ${plural(of("time/step").filter(Number.isFinite).length, "step")}`],
    of("rollout/tokens_per_s") && ["Tokens per second", number(throughput(run)), "generated, all steps"],
    of("idle/actor") && ["Actor busy", share(atWork(run)), "of the time of all steps"],
  ].filter(Boolean);
  return h("dl", { class: "tiles" }, shown.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), more && h("dd", { class: "more" }, more))));
}

function problems(runs) {
  const found = runs.flatMap((run) => run.problems.map((text) => (runs.length > 1 ? `${run.name}: ${text}` : text)));
  return found.length > 0 && h("details", { class: "note", open: found.length < 4 }, h("summary", {}, `${plural(found.length, "file or line is", "files or lines are")} missing or damaged`), h("ul", {}, found.map((text) => h("li", {}, text))));
}

function emChart(runs) {
  const points = (run, pick) => run.evaluations.map((one) => [one.step, pick(one)]);
  const series = runs.map((run, place) => ({ name: runs.length > 1 ? run.name : "all", colour: colourOf(place), marks: true, points: points(run, (one) => one.em) }));
  if (runs.length === 1) {
    const parts = (key) => [...new Set(runs[0].evaluations.flatMap((one) => Object.keys(one[key] ?? {})))];
    const hops = parts("em_by_hop").map((hop) => [`${hop}-hop`, (one) => one.em_by_hop?.[hop]]);
    const sources = sourcesOf(runs[0]).map((name) => [name.slice(3), (one) => one.figures?.[name]]);
    const split = hops.length > 1 ? hops : sources;
    split.slice(0, 5).forEach(([name, pick], place) => series.push({ name, colour: colourOf(place + 1), thin: true, marks: true, points: points(runs[0], pick) }));
    if (series.length === 1) series[0].name = null;
  }
  return lineChart({ title: "Exact match", note: "of held-out questions", series, format: share, zero: true, brief: runs.length > 1 });
}

function chartOf(runs, [title, note, names, called]) {
  const series = runs.length > 1
    ? runs.map((run, place) => ({ name: run.name, colour: colourOf(place), points: pointsOf(run, names[0]) }))
    : names.filter((name) => runs[0].metrics[name]).map((name, place, found) => ({ name: found.length > 1 ? called[names.indexOf(name)] : null, colour: colourOf(place), points: pointsOf(runs[0], name) }));
  const apart = series.filter((one, place) => place === 0 || JSON.stringify(one.points) !== JSON.stringify(series[0].points));
  if (apart.length === 1 && runs.length === 1) apart[0].name = null;
  const format = formatOf(explained(runs, names[0])[0]);
  // Omit metrics that are always 0, such as the staleness of a strictly on-policy run.
  return series.some((one) => one.points.some((point) => point[1])) ? lineChart({ title, note, series: runs.length > 1 ? series : apart, format, zero: format === share, brief: runs.length > 1 }) : null;
}

// Table of several runs, one column each, and the settings in which they differ.
function compared(runs) {
  const evaluation = (run, pick) => (run.evaluations.length ? pick(run.evaluations) : null);
  const rows = [
    ["exact match before", share, (run) => evaluation(run, (found) => found[0].em)],
    ["exact match after", share, (run) => evaluation(run, (found) => found.at(-1).em)],
    ["best exact match", share, (run) => evaluation(run, (found) => Math.max(...found.map((one) => one.em)))],
    ["searches per question", number, (run) => evaluation(run, (found) => found.at(-1).searches)],
    ["reward, last step", number, (run) => last(run.metrics["critic/score/mean"])],
    ["entropy, last step", number, (run) => last(run.metrics["actor/entropy"])],
    ["KL to the reference", number, (run) => last(run.metrics["kl/k3"])],
    ["steps", number, (run) => run.steps.length],
    ["time per step", seconds, (run) => mean(run.metrics["time/step"] ?? [])],
    ["generated tokens per second", number, throughput],
    ["actor busy", share, atWork],
    ["staleness", number, (run) => weighted(run.metrics["staleness/mean"], sampledTokens(run))],
    ["faults", number, (run) => (run.faults.length || null)],
    ["phase", String, (run) => run.life.phase],
    ["begun", date, (run) => run.lives[0]?.begun],
  ].filter(([, , pick]) => runs.some((run) => pick(run) !== null && pick(run) !== undefined));
  const head = runs.map(named);
  return [
    h("section", {}, h("h2", {}, "Side by side"), table(["", ...head], rows.map(([name, format, pick]) => [name, ...runs.map((run) => format(pick(run)))]), { label: "Runs side by side", class: "beside" })),
    h("section", {}, h("h2", {}, "Settings that differ"), differences(runs, FOLDED)),
  ];
}

export function differences(runs, most = Infinity) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const text = (run, key) => (key in run.config ? JSON.stringify(run.config[key]) : "absent");
  const apart = keys.filter((key) => new Set(runs.map((run) => text(run, key))).size > 1);
  if (!apart.length) return h("p", { class: "soft" }, "None.");
  const found = table(["key", ...runs.map((run) => run.name)], apart.map((key) => [h("code", {}, key), ...runs.map((run) => h("code", {}, text(run, key)))]), { label: "Settings that differ", text: true, class: "keys" });
  return apart.length > most ? h("details", {}, h("summary", {}, plural(apart.length, "setting")), found) : found;
}

function look(run, which) {
  const { columns } = run.trajectories;
  const order = [...columns.reward.keys()];
  const by = (value) => order.toSorted((a, b) => value(b) - value(a) || b - a);
  // At most one trajectory per question, for variety.
  const some = (sorted) => {
    const questions = new Set();
    return sorted.filter((place) => !questions.has(columns.question[place]) && questions.add(columns.question[place])).slice(0, 4);
  };
  const best = some(by((place) => (columns.reward[place] ?? -Infinity) + (columns.advantage[place] ?? 0) / 1e3));
  const worst = some(by((place) => -(columns.reward[place] ?? Infinity) - (columns.advantage[place] ?? 0) / 1e3));
  const list = (title, sort, places) => h("div", {}, h("h3", {}, title), h("ol", { class: "cards" }, places.map((place) => card(run, place))), h("p", {}, h("a", { href: link({ view: "trajectories", sort }) }, "show all")));
  return h("section", {}, h("h2", {}, "Trajectories to look at", which), h("div", { class: "two" }, list("Highest reward", "best", best), list("Lowest reward", "worst", worst)));
}
