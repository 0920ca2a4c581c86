// Drift between engine log-probs and recomputed ones: by cause, version lag, turn, step and token.

import { h, table } from "./dom.js";
import { number, plural, share, signed } from "./format.js";
import { shareBar, stackedBars } from "./bars.js";
import { lineChart } from "./chart.js";
import { link } from "./state.js";

export const CAUSES = {
  numerics: ["numerics", "same tokens, same policy: the arithmetic of engine and trainer", "var(--s0)"],
  version_lag: ["version lag", "sampled by an older policy", "var(--s1)"],
  changed_prefix: ["changed prefix", "re-tokenisation changed tokens before it", "var(--s4)"],
  retokenised: ["re-tokenised", "changed by re-tokenisation: no log-prob to compare", "var(--s3)"],
  unsampled: ["not sampled", "an added end-of-sequence token", "var(--s5)"],
};

export function drift(run) {
  const found = run.drift;
  const head = h("h2", {}, "Drift between rollout and training");
  if (!found) return h("section", {}, head, h("p", { class: "note" }, "Drift needs kept trajectories, and this run has none (tracking.trajectories)."));
  const rows = found.causes.filter((one) => one.tokens > 0).reverse();
  const parts = rows.map((one) => ({ name: CAUSES[one.cause]?.[0] ?? one.cause, value: one.tokens, colour: CAUSES[one.cause]?.[2] ?? "var(--soft)" }));
  return h("section", {}, head,
    h("p", {}, `${plural(found.tokens, "trained token")} in ${plural(found.trajectories, "kept trajectory", "kept trajectories")}, each under the first cause that applies. A difference d is the recomputed log-prob minus the engine's, in nats.`),
    shareBar(parts, { label: "Trained tokens by cause of drift", format: number }),
    table(["cause", "tokens", "share", "mean", "mean |d|", "rms", "ratio", "95 %", "largest"], rows.map((one) => [
      h("span", { title: CAUSES[one.cause]?.[1] }, CAUSES[one.cause]?.[0] ?? one.cause),
      number(one.tokens), share(one.share), ...spreadCells(one.differences, found.quantiles)]), { label: "Drift by cause" }),
    h("p", { class: "soft" }, "ratio: mean of exp(d); 1 means no drift. 95 %: 95th percentile of d. largest: largest |d|."),
    found.tokens > 0 && [sizes(found), h("div", { class: "two" }, byLag(found), byTurn(found))],
    h("div", { class: "two" }, histogram(found, rows), byStep(found)),
    worst(run, found));
}

export function spreadCells(spread, quantiles) {
  const upper = spread.quantiles?.[quantiles.indexOf(0.95)];
  return [spread.mean, spread.mean_abs, spread.rms].map(number).concat([spread.exp_mean === null ? "–" : spread.exp_mean.toFixed(4), number(upper), number(spread.largest)]);
}

export function ofCause(found, cause) {
  return found.causes.find((one) => one.cause === cause);
}

// Each cause's own contribution, or the reason why there is none.
function sizes(found) {
  const rows = [["version lag", lagSize], ["sampler", samplerSize], ["tokenisation", tokenisationSize], ["numerics", numericsSize]];
  return [h("h3", {}, "Contribution of each cause"),
    h("dl", { class: "pairs" }, rows.map(([name, size]) => [h("dt", {}, name), h("dd", {}, size(found))]))];
}

function nats(text, of) {
  return h("b", {}, `${text} nats per ${of}`);
}

function lagSize(found) {
  const { rms } = ofCause(found, "version_lag").differences, floor = ofCause(found, "numerics").differences.rms;
  if (rms === null) return [h("b", {}, "None"), ": no trained token was sampled by an older policy and kept as sampled."];
  if (floor === null) return [nats(`At most ${number(rms)}`, "token"), ", rms: the share of numerics is unknown, because the trained policy itself sampled no token."];
  const both = `tokens of older policies differ by ${number(rms)}, those of the trained policy by ${number(floor)}`;
  return found.beyond_numerics ? [nats(number(found.beyond_numerics), "token"), `, rms: ${both}; independent errors add up in squares.`]
    : [h("b", {}, "None visible"), `: ${both} (rms), which is numerics alone.`];
}

function samplerSize(found) {
  const one = found.sampler;
  if (!one.truncated) return [h("b", {}, "None"), `: both sides use temperature ${one.temperature}, and neither top_p nor top_k truncates.`];
  if (!one.tokens) return [h("b", {}, "Unknown"), ": no trained token is as sampled."];
  const cuts = [one.top_p < 1 && `top_p ${one.top_p}`, one.top_k > 0 && `top_k ${one.top_k}`].filter(Boolean).join(" and ");
  const range = one.most === one.least ? number(-one.least) : `${number(-one.most)} to ${number(-one.least)}`;
  return [nats(range, "token"), `, mean: the true log-ratio is lower than the recorded one by this much, because ${cuts} truncated the sampling. Exact for ${share(one.exact / one.tokens)} of ${plural(one.tokens, "token")}.`];
}

function tokenisationSize(found) {
  const { turns_same: same, turns_changed: changed } = found;
  const cut = ofCause(found, "retokenised").tokens + ofCause(found, "changed_prefix").tokens;
  if (changed.count) return [nats(signed(changed.mean), "turn"), `, mean of ${plural(changed.count, "re-tokenised turn")}, other drift included. `, same.count ? `Turns as sampled have ${signed(same.mean)}.` : "The share of other drift is unknown, because no turn is as sampled."];
  if (cut) return [h("b", {}, "Unknown"), ": a token that was not sampled has no log-prob to compare, and no re-tokenised turn has both sums over the same text."];
  return [h("b", {}, "None"), ": every sampled token is trained as it was sampled."];
}

function numericsSize(found) {
  const { rms } = ofCause(found, "numerics").differences;
  return rms === null ? [h("b", {}, "Unknown"), ": no trained token is as sampled by the trained policy itself."]
    : [nats(number(rms), "token"), ", rms: difference between engine and trainer for the same policy and tokens."];
}

const SPREAD = ["mean", "mean |d|", "rms"];

function briefCells(spread) {
  return [number(spread.count), ...[spread.mean, spread.mean_abs, spread.rms].map(number)];
}

// Empty if the trained policy sampled all tokens: that is numerics, which has its row above.
function byLag(found) {
  const rows = Object.entries(found.by_lag);
  return rows.some(([lag]) => lag !== "0") && h("div", {}, h("h3", {}, "By version lag"),
    h("p", { class: "soft" }, "Tokens as sampled, by the number of versions between sampling and training: at 0 the difference is numerics, and growth from there is version lag."),
    table(["versions", "tokens", ...SPREAD], rows.map(([lag, spread]) => [lag, ...briefCells(spread)]), { label: "Drift by version lag" }));
}

function byTurn(found) {
  const { turns_same: same, turns_changed: changed, turns_apart: apart } = found;
  return same.count + changed.count + apart > 0 && h("div", {}, h("h3", {}, "By turn"),
    h("p", { class: "soft" }, "Summed log-probs of a turn, recomputed minus sampled: the same text on both sides, whatever its tokens. A turn is not comparable if a token crosses its edge, a limit truncated it, or its sampled tokens are unknown."),
    table(["turns", "number", ...SPREAD], [["as sampled", ...briefCells(same)], ["re-tokenised", ...briefCells(changed)], ["not comparable", number(apart), ...SPREAD.map(() => "–")]], { label: "Drift by turn" }));
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
  return h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, "Size of differences"), h("small", {}, "tokens by |d| in nats, bins of half a decade")), stackedBars({ bars: shown, format: number, height: 170, label: "Tokens by size of difference" }));
}

function short(value) {
  return value >= 0.01 ? String(Number(value.toPrecision(1))) : value.toExponential(0).replace("-", "\u2212");
}

function byStep(found) {
  const series = Object.entries(CAUSES).map(([cause, [name, , colour]]) => ({ name, colour, points: found.steps.map((step) => [step.step, step.mean_abs[cause]]) }));
  return lineChart({ title: "Mean |d| of each step", note: "nats, log scale", series, height: 170, log: true });
}

function find(run, one) {
  const columns = run.trajectories?.columns;
  return columns ? columns.step.findIndex((step, place) => step === one.step && columns.sample[place] === one.sample && run.trajectories.questions[columns.question[place]].uid === one.question_uid) : -1;
}

export function where(run, one) {
  const place = find(run, one);
  const text = `step ${one.step}, ${one.question_uid} (${one.sample})`;
  return place < 0 ? text : h("a", { href: link({ view: "trajectories", trajectory: place, colour: "ratio" }) }, text);
}

// A token in its context, on one line.
export function around(before, text, after) {
  const line = (part) => part.replaceAll("\n", "⏎");
  return h("span", { class: "piece" }, h("span", { class: "soft" }, line(before)), h("mark", {}, line(text)), h("span", { class: "soft" }, line(after)));
}

function worst(run, found) {
  return found.worst.length > 0 && h("details", {}, h("summary", {}, h("h3", {}, "Tokens with the largest differences")),
    table(["token", "difference", "engine", "recomputed", "cause", "where"], found.worst.map((one) => [
      around(one.before, one.text, ""), number(one.difference), number(one.rollout), number(one.recomputed), CAUSES[one.cause]?.[0] ?? one.cause, where(run, one)]), { label: "Tokens with the largest differences", text: true }));
}
