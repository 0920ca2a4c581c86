// Faults: what failed and when, what was lost, and how long the run took to recover. Also engines that joined and left.

import { h, table } from "./dom.js";
import { date, plural, seconds } from "./format.js";

const SAID = { died: "died", hung: "hung", unreachable: "did not answer", displaced: "lost its machine" };

function outcomeOf(fault) {
  if (fault.outcome === "recovered") return h("b", { class: "good" }, "recovered");
  return h("b", { class: "bad" }, fault.outcome === "given_up" ? "given up" : "not over");
}

// Short name of a fault: "engine 1 died".
export function faultLine(fault) {
  return `${fault.part} ${SAID[fault.kind] ?? fault.kind}`;
}

export function faultsOf(run, step) {
  return run.faults.filter((fault) => fault.step === step).map(faultLine);
}

// "3 faults: 2 recovered within 12.5 s, 1 given up"; null without faults.
export function faultSentence(run) {
  if (!run.faults.length) return null;
  const times = run.faults.filter((fault) => fault.outcome === "recovered").map((fault) => fault.ended_s - fault.began_s);
  const lost = run.faults.filter((fault) => fault.outcome === "given_up").length;
  const open = run.faults.length - times.length - lost;
  const parts = [times.length && `${times.length} recovered within ${seconds(Math.max(...times))}`, lost && `${lost} given up`, open && `${open} not over`];
  return `${plural(run.faults.length, "fault")}: ${parts.filter(Boolean).join(", ")}`;
}

// Faults of the current launch that are not over.
export function openFaults(run, status) {
  return run.faults.filter((fault) => fault.outcome === null && fault.began_s >= status.begun);
}

export function faultSection(run) {
  if (!run.faults.length) return null;
  const rows = run.faults.map((fault) => [
    h("span", {}, date(fault.began_s)), String(fault.step), h("b", {}, faultLine(fault)), h("span", {}, fault.detail),
    h("span", {}, outcomeOf(fault), fault.ending && ` ${fault.ending}`), fault.ended_s === null ? "–" : seconds(fault.ended_s - fault.began_s),
  ]);
  return h("section", { id: "faults" }, h("h2", {}, "Faults"), h("p", {}, `${faultSentence(run)}.`),
    table(["began", "step", "what failed", "cause and loss", "end", "after"], rows, { label: "Faults", class: "faults" }));
}

// Engines that joined and left on purpose; null without any.
export function changeSection(run) {
  if (!run.changes.length) return null;
  const rows = run.changes.map((change) => [
    h("span", {}, date(change.at_s)), String(change.step), h("b", {}, `${change.part} ${change.change}`), h("span", {}, change.detail),
  ]);
  return h("section", { id: "changes" }, h("h2", {}, "Engines that joined and left"),
    table(["when", "step", "engine", "how"], rows, { label: "Engines that joined and left", class: "faults" }));
}
