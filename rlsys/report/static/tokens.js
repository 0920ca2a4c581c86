// Tokens: staleness, micro-batch fill, drift between engine and recomputed log-probs, and the re-tokenisation audit.

import { h, table } from "./dom.js";
import { mean, number, plural, share, signed, weighted } from "./format.js";
import { namedBars, stackedBars } from "./bars.js";
import { colourOf, lineChart, named } from "./chart.js";
import { curveOf, pointsOf } from "./curves.js";
import { CAUSES, around, drift, ofCause, spreadCells, where } from "./drift.js";
import { runOf } from "./state.js";

export function tokens(all, now) {
  const run = all.runs[runOf(all, now)];
  return [
    all.runs.length > 1 && beside(all.runs, run),
    h("div", { class: "two" }, staleness(run), fill(all.runs, run)),
    drift(run),
    audit(run),
  ];
}

// Summary of the sections below, one column per run.
function beside(runs, chosen) {
  const drifts = (pick) => (run) => run.drift && pick(run.drift);
  const ages = [...new Set(runs.flatMap(lags))].sort((a, b) => a.slice(14) - b.slice(14));
  const cut = runs.some((run) => run.drift?.sampler.truncated);
  const rows = [
    ["staleness, mean versions", number, (run) => weighted(run.metrics["staleness/mean"], sampledTokens(run))],
    ...ages.map((name) => [`tokens sampled ${age(name)} earlier`, share, (run) => (lags(run).length ? shareOfAge(run, name) : null)]),
    ...Object.entries(CAUSES).map(([cause, [name]]) => [`${name}, mean |d|`, number, drifts((found) => ofCause(found, cause).differences.mean_abs)]),
    ["version lag beyond numerics, rms", number, drifts((found) => found.beyond_numerics)],
    ["sampler, mean at most", number, drifts((found) => (cut ? -found.sampler.least : null))],
    ["re-tokenised turns, mean sum of d", signed, drifts((found) => found.turns_changed.mean)],
    ["tokens changed by re-tokenisation", share, (run) => (run.audit?.total?.sampled ? differing(run.audit.total) : null)],
  ].filter(([, , pick]) => runs.some((run) => Number.isFinite(pick(run))));
  const head = runs.map(named);
  return rows.length > 0 && h("section", {}, h("h2", {}, "Side by side"),
    table(["", ...head], rows.map(([name, format, pick]) => [name, ...runs.map((run) => format(pick(run)))]), { label: "Tokens of the runs side by side", class: "beside text" }),
    h("p", { class: "soft" }, `Differences d of log-probs are in nats, over kept trajectories. The sections below show ${chosen.name}, and micro-batch fill of all runs.`));
}

function lags(run) {
  return Object.keys(run.metrics).filter((name) => /^staleness\/lag_\d+$/.test(name)).sort((a, b) => a.slice(14) - b.slice(14));
}

function age(name) {
  return `${name.slice(14)} ${name.endsWith("_1") ? "version" : "versions"}`;
}

// Sampled tokens of each step; 1 if unknown, so that such steps count equally.
export function sampledTokens(run) {
  return run.steps.map((_, at) => {
    const trained = run.metrics["state_tokens/total"]?.[at];
    return Number.isFinite(trained) ? trained - (run.metrics["staleness/unversioned_tokens"]?.[at] ?? 0) : 1;
  });
}

// Share of all sampled tokens, not a mean over steps; a step without tokens of this staleness has no such metric.
function shareOfAge(run, name) {
  return weighted(run.steps.map((_, at) => run.metrics[name]?.[at] ?? 0), sampledTokens(run));
}

function staleness(run) {
  const names = lags(run);
  if (!names.length) return h("section", {}, h("h2", {}, "Staleness"), h("p", { class: "note" }, "The run's metrics have no staleness."));
  if (names.slice(1).every((name) => !mean(run.metrics[name])))
    return h("section", {}, h("h2", {}, "Staleness"), h("p", {}, h("b", {}, "None."), " Every trained token was sampled by the weight version that was then trained."));
  const shades = (place) => (place === 0 ? "var(--s0)" : `color-mix(in srgb, var(--s1) ${40 + (60 * place) / (names.length - 1)}%, var(--card))`);
  const bars = run.steps.map((step, at) => ({ label: String(step), title: `step ${step}`, parts: names.map((name, place) => ({ name: age(name), value: run.metrics[name][at] ?? 0, colour: shades(place) })) }));
  return h("section", {}, h("h2", {}, "Staleness"),
    h("p", { class: "soft" }, "Trained tokens by the number of weight versions between sampling and training, all steps."),
    namedBars(names.map((name, place) => ({ name: age(name), value: shareOfAge(run, name), text: share(shareOfAge(run, name)), colour: shades(place) })), { label: "Staleness of trained tokens" }),
    names.length > 1 && stackedBars({ bars, format: share, height: 140, label: "Shares of each step's tokens by staleness" }));
}

function fill(runs, run) {
  const names = Object.keys(run.metrics).filter((name) => /^batch\//.test(name));
  const kinds = Object.entries(Object.groupBy(names, (name) => name.split("/")[1]));
  const group = (name) => name.split("/").slice(2).join("/");
  // One run: all groups in one chart. Several runs: one chart per group.
  const charts = runs.length > 1 ? names.map((name) => curveOf(runs, name, { zero: true, height: 130 })).filter(Boolean)
    : kinds.map(([kind, some]) => lineChart({ title: { fill: "Fill", padding: "Padding" }[kind] ?? kind, note: { fill: "share of the micro-batch token budget used", padding: "share of computed tokens that are padding" }[kind], zero: true, height: 130, format: share,
      series: some.map((name, place) => ({ name: group(name) || null, colour: colourOf(place), points: pointsOf(run, name) })) })).filter(Boolean);
  return h("section", {}, h("h2", {}, "Micro-batch fill"),
    charts.length ? [h("div", { class: "charts" }, charts)] : h("p", { class: "note" }, "The run's metrics have no micro-batch fill."));
}

const PLACES = { tag: "in or beside a tag", unicode: "beside non-ASCII", digit: "beside digits", space: "beside white space", other: "elsewhere", broken: "invalid UTF-8" };

function differing(one) {
  return one.sampled ? one.sampled_differing / one.sampled : 0;
}

function audit(run) {
  const found = run.audit;
  const head = h("h2", {}, "Re-tokenisation");
  if (!found || found.problem) return h("section", {}, head, h("p", { class: "note" }, found?.problem ?? "No token audit: no trajectory was kept, or the run is still active. `rlsys audit tokens` makes one."));
  const rate = (one) => share(differing(one));
  const counts = (one) => [number(one.sampled), number(one.sampled_differing), rate(one), number(one.stretches)];
  return h("section", {}, head,
    h("p", {}, h("b", {}, rate(found.total)), ` of ${plural(found.total.sampled, "sampled token")} change when their text is re-tokenised`, found.mode === "append" ? "; the run trains on the sampled tokens (token_mode append), so this is only what would change." : ".",
      ` This affects ${share(found.affected.tokens)} of trained tokens, ${share(found.affected.turns)} of turns and ${share(found.affected.trajectories)} of trajectories.`),
    h("div", { class: "two" },
      h("div", {}, h("h3", {}, "By turn"), table(["turn", "sampled", "differing", "share", "stretches"], [...Object.entries(found.by_turn).map(([turn, one]) => [String(Number(turn) + 1), ...counts(one)]), ["all", ...counts(found.total)]], { label: "Differing tokens by turn" })),
      h("div", {}, h("h3", {}, "By kind of place"), namedBars(Object.entries(found.by_place).map(([place, one]) => ({ name: PLACES[place] ?? place, value: one.sampled_differing })), { label: "Differing tokens by place" }))),
    bias(found),
    found.examples.length > 0 && h("details", {}, h("summary", {}, h("h3", {}, "Examples")), table(["sampled", "re-tokenised", "place", "times", "around", "log-ratio", "where"], found.examples.map((one) => [
      pieces(one.sampled), pieces(one.retokenised), one.place, number(one.count), around(one.before, one.sampled.join(""), one.after), number(one.log_ratio), where(run, one)]), { label: "Examples of differing tokens", text: true })));
}

function pieces(texts) {
  return h("span", { class: "piece" }, texts.map((text) => h("span", { class: "tok" }, text)));
}

function bias(found) {
  const one = found.bias;
  if (!one) return null;
  const rows = Object.entries(one).filter(([, value]) => value && typeof value === "object" && "exp_mean" in value);
  return rows.length > 0 && [h("h3", {}, "Effect on the ratio"),
    table(["stretches", "count", "mean", "mean |d|", "rms", "ratio", "95 %", "largest"], rows.map(([name, spread]) => [name.replaceAll("_", " "), number(spread.count), ...spreadCells(spread, found.quantiles)]), { label: "Bias on the ratio" })];
}
