// Tokens as the trainer got them: how old they were, how full the batches, how far the engine's log-probs are from the
// recomputed ones and why, and what re-tokenising the text changed.

import { h, table } from "./dom.js";
import { mean, number, plural, share } from "./format.js";
import { namedBars, shareBar, stackedBars } from "./bars.js";
import { colourOf, lineChart } from "./chart.js";
import { curveOf, pointsOf } from "./curves.js";
import { link, runOf } from "./state.js";

const CAUSES = {
  numerics: ["numerics", "same tokens, same policy: the arithmetics of engine and trainer", "var(--s0)"],
  version_lag: ["version lag", "drawn by an older policy", "var(--s1)"],
  changed_prefix: ["changed prefix", "tokens before it are cut otherwise", "var(--s4)"],
  retokenised: ["re-tokenised", "cut into other tokens: no log-prob to compare", "var(--s3)"],
  unsampled: ["not drawn", "an added end of sequence", "var(--s5)"],
};

export function tokens(all, now) {
  const run = all.runs[runOf(all, now)];
  return [
    h("div", { class: "two" }, staleness(run), fill(all.runs, run)),
    drift(run),
    audit(run),
  ];
}

function lags(run) {
  return Object.keys(run.metrics).filter((name) => /^staleness\/lag_\d+$/.test(name)).sort((a, b) => a.slice(14) - b.slice(14));
}

function staleness(run) {
  const names = lags(run);
  if (!names.length) return h("section", {}, h("h2", {}, "Staleness"), h("p", { class: "note" }, "How old tokens were is not in the run's metrics."));
  if (names.slice(1).every((name) => !mean(run.metrics[name])))
    return h("section", {}, h("h2", {}, "Staleness"), h("p", {}, h("b", {}, "None."), " Every trained token was sampled by the policy that was then trained."));
  const of = (name) => `${name.slice(14)} ${name.endsWith("_1") ? "version" : "versions"}`;
  const shades = (place) => (place === 0 ? "var(--s0)" : `color-mix(in srgb, var(--s1) ${40 + (60 * place) / (names.length - 1)}%, var(--card))`);
  // Of all tokens that were sampled, not of steps, which have more or fewer of them; a step without tokens of an age does not record it.
  const weights = run.steps.map((_, at) => (run.metrics["state_tokens/total"]?.[at] ?? 1) - (run.metrics["staleness/unversioned_tokens"]?.[at] ?? 0));
  const whole = weights.reduce((sum, one) => sum + one, 0);
  const shareOf = (name) => weights.reduce((sum, one, at) => sum + one * (run.metrics[name][at] ?? 0), 0) / whole;
  const bars = run.steps.map((step, at) => ({ label: String(step), title: `step ${step}`, parts: names.map((name, place) => ({ name: of(name), value: run.metrics[name][at] ?? 0, colour: shades(place) })) }));
  return h("section", {}, h("h2", {}, "Staleness"),
    h("p", { class: "soft" }, "Trained tokens by how many versions older the policy was that sampled them, all steps."),
    namedBars(names.map((name, place) => ({ name: of(name), value: shareOf(name), text: share(shareOf(name)), colour: shades(place) })), { label: "Staleness of trained tokens" }),
    names.length > 1 && stackedBars({ bars, format: share, height: 140, label: "Shares of each step's tokens by age" }));
}

function fill(runs, run) {
  const names = Object.keys(run.metrics).filter((name) => /^batch\//.test(name));
  const kinds = Object.entries(Object.groupBy(names, (name) => name.split("/")[1]));
  const group = (name) => name.split("/").slice(2).join("/");
  // Of one run all groups in one chart; of several runs a chart for each group.
  const charts = runs.length > 1 ? names.map((name) => curveOf(runs, name, { zero: true, height: 130 })).filter(Boolean)
    : kinds.map(([kind, some]) => lineChart({ title: { fill: "Fill", padding: "Padding" }[kind] ?? kind, note: { fill: "of the token budget of micro-batches", padding: "of the tokens computed" }[kind], zero: true, height: 130, format: share,
      series: some.map((name, place) => ({ name: group(name) || null, colour: colourOf(place), points: pointsOf(run, name) })) })).filter(Boolean);
  return h("section", {}, h("h2", {}, "How full batches were"),
    charts.length ? [h("div", { class: "charts" }, charts)] : h("p", { class: "note" }, "How full batches were is not in the run's metrics."));
}

function drift(run) {
  const found = run.drift;
  const head = h("h2", {}, "Drift between rollout and training");
  if (!found) return h("section", {}, head, h("p", { class: "note" }, "There is no trajectory to work it out from: none was kept (tracking.trajectories)."));
  const rows = found.causes.filter((one) => one.tokens > 0).reverse();
  const parts = rows.map((one) => ({ name: CAUSES[one.cause]?.[0] ?? one.cause, value: one.tokens, colour: CAUSES[one.cause]?.[2] ?? "var(--soft)" }));
  return h("section", {}, head,
    h("p", {}, `Of ${plural(found.tokens, "trained token")} in ${plural(found.trajectories, "kept trajectory", "kept trajectories")}, each by the first cause that holds. A difference is the recomputed log-prob less the engine's, in nats.`),
    shareBar(parts, { label: "Trained tokens by cause of drift", format: number }),
    table(["cause", "tokens", "share", "mean", "mean |d|", "rms", "ratio", "95 %", "largest"], rows.map((one) => [
      h("span", { title: CAUSES[one.cause]?.[1] }, CAUSES[one.cause]?.[0] ?? one.cause),
      number(one.tokens), share(one.share), ...spreadCells(one.differences, found.quantiles)]), { label: "Drift by cause" }),
    h("p", { class: "soft" }, "ratio: mean of exp(d), 1 where nothing is off. 95 %: quantile of d from below."),
    h("div", { class: "two" }, histogram(found, rows), byStep(found)),
    sampler(found),
    worst(run, found));
}

function spreadCells(spread, quantiles) {
  const upper = spread.quantiles?.[quantiles.indexOf(0.95)];
  return [spread.mean, spread.mean_abs, spread.rms].map(number).concat([spread.exp_mean === null ? "–" : spread.exp_mean.toFixed(4), number(upper), number(spread.largest)]);
}

function histogram(found, rows) {
  const edges = found.histogram_edges;
  const name = (place) => (place === 0 ? `below ${edges[0].toExponential(0)}` : place === edges.length ? `from ${number(edges.at(-1))}` : `${short(edges[place - 1])} to ${short(edges[place])}`);
  const counted = rows.filter((one) => one.histogram.some((count) => count > 0));
  const bars = Array.from({ length: edges.length + 1 }, (_, place) => ({
    label: place === 0 ? "0" : short(edges[place - 1]), title: `|d| ${name(place)}`,
    parts: counted.map((one) => ({ name: CAUSES[one.cause]?.[0] ?? one.cause, value: one.histogram[place], colour: CAUSES[one.cause]?.[2] })),
  }));
  const full = bars.map((bar) => bar.parts.some((part) => part.value > 0));
  const shown = bars.slice(Math.max(0, full.indexOf(true) - 1), full.lastIndexOf(true) + 2);
  return h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, "Size of differences"), h("small", {}, "tokens by |d| in nats, half a decade each")), stackedBars({ bars: shown, format: number, height: 170, label: "Tokens by size of difference" }));
}

function short(value) {
  return value >= 0.01 ? String(Number(value.toPrecision(1))) : value.toExponential(0).replace("-", "\u2212");
}

function byStep(found) {
  const series = Object.entries(CAUSES).map(([cause, [name, , colour]]) => ({ name, colour, points: found.steps.map((step) => [step.step, step.mean_abs[cause]]) }));
  return lineChart({ title: "Mean |d| of each step", note: "nats, by powers of ten", series, height: 170, log: true });
}

function sampler(found) {
  const one = found.sampler;
  if (!one.truncated) return h("p", { class: "after" }, `The sampler adds nothing: temperature ${one.temperature} is on both sides, and neither top_p nor top_k cuts.`);
  return h("p", {}, `The sampler cuts (top_p ${one.top_p}, top_k ${one.top_k}): the true log-ratio is lower than the recorded one by ${number(-one.most)} to ${number(-one.least)} nats a token on average; exact for ${share(one.tokens ? one.exact / one.tokens : 0)} of ${plural(one.tokens, "token")}.`);
}

function find(run, one) {
  const columns = run.trajectories?.columns;
  return columns ? columns.step.findIndex((step, place) => step === one.step && columns.sample[place] === one.sample && run.trajectories.questions[columns.question[place]].uid === one.question_uid) : -1;
}

function where(run, one) {
  const place = find(run, one);
  const text = `step ${one.step}, ${one.question_uid} (${one.sample})`;
  return place < 0 ? text : h("a", { href: link({ view: "trajectories", trajectory: place, colour: "ratio" }) }, text);
}

// A token in its line, which line ends do not break.
function around(before, text, after) {
  const line = (part) => part.replaceAll("\n", "⏎");
  return h("span", { class: "piece" }, h("span", { class: "soft" }, line(before)), h("mark", {}, line(text)), h("span", { class: "soft" }, line(after)));
}

function worst(run, found) {
  return found.worst.length > 0 && h("details", {}, h("summary", {}, h("h3", {}, "Tokens furthest apart")),
    table(["token", "difference", "engine", "recomputed", "cause", "where"], found.worst.map((one) => [
      around(one.before, one.text, ""), number(one.difference), number(one.rollout), number(one.recomputed), CAUSES[one.cause]?.[0] ?? one.cause, where(run, one)]), { label: "Tokens furthest apart", text: true }));
}

const PLACES = { tag: "in or beside a tag", unicode: "beside what is not ASCII", digit: "beside digits", space: "beside spaces", other: "elsewhere", broken: "bytes that are no character" };

function audit(run) {
  const found = run.audit;
  const head = h("h2", {}, "Sampled and re-tokenised");
  if (!found || found.problem) return h("section", {}, head, h("p", { class: "note" }, found?.problem ?? "There is no trajectory to audit, or this view leaves the audit out: rlsys audit tokens makes it."));
  const rate = (one) => share(one.drawn ? one.drawn_differing / one.drawn : 0);
  const counts = (one) => [number(one.drawn), number(one.drawn_differing), rate(one), number(one.stretches)];
  return h("section", {}, head,
    h("p", {}, h("b", {}, rate(found.total)), ` of ${plural(found.total.drawn, "drawn token")} are not what re-tokenising their text gives`, found.mode === "append" ? "; the run trains on what was drawn (append), so this is only what would differ." : ".",
      ` Affected are ${share(found.affected.tokens)} of trained tokens, ${share(found.affected.turns)} of turns, ${share(found.affected.trajectories)} of trajectories.`),
    h("div", { class: "two" },
      h("div", {}, h("h3", {}, "By turn"), table(["turn", "drawn", "differing", "share", "stretches"], [...Object.entries(found.by_turn).map(([turn, one]) => [String(Number(turn) + 1), ...counts(one)]), ["all", ...counts(found.total)]], { label: "Differing tokens by turn" })),
      h("div", {}, h("h3", {}, "By kind of place"), namedBars(Object.entries(found.by_place).map(([place, one]) => ({ name: PLACES[place] ?? place, value: one.drawn_differing })), { label: "Differing tokens by place" }))),
    bias(found),
    found.examples.length > 0 && h("details", {}, h("summary", {}, h("h3", {}, "Examples")), table(["sampled", "re-tokenised", "place", "times", "around", "log-ratio", "where"], found.examples.map((one) => [
      pieces(one.drawn), pieces(one.again), one.place, number(one.count), around(one.before, one.drawn.join(""), one.after), number(one.log_ratio), where(run, one)]), { label: "Examples of differing tokens", text: true })));
}

function pieces(texts) {
  return h("span", { class: "piece" }, texts.map((text) => h("span", { class: "tok" }, text)));
}

function bias(found) {
  const one = found.bias;
  if (!one) return null;
  const rows = Object.entries(one).filter(([, value]) => value && typeof value === "object" && "exp_mean" in value);
  return rows.length > 0 && [h("h3", {}, "What it does to the ratio"),
    table(["stretches", "count", "mean", "mean |d|", "rms", "ratio", "95 %", "largest"], rows.map(([name, spread]) => [name.replaceAll("_", " "), number(spread.count), ...spreadCells(spread, found.quantiles)]), { label: "Bias on the ratio" })];
}
