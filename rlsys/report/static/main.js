// The page: header, navigation, and the view named in the address.

import { add, h, hideTip, visible } from "./dom.js";
import { date, plural, since } from "./format.js";
import { follow, live, load, model } from "./data.js";
import { go, link, runOf, state, viewOf } from "./state.js";
import { colourOf } from "./chart.js";
import { overview } from "./overview.js";
import { curves } from "./curves.js";
import { times } from "./times.js";
import { tokens } from "./tokens.js";
import { trajectories } from "./trajectories.js";
import { evaluations } from "./evaluations.js";
import { setup } from "./setup.js";
import { faultLine, openFaults } from "./faults.js";

const VIEWS = {
  overview: ["Overview", overview],
  curves: ["Curves", curves],
  time: ["Time", times],
  tokens: ["Tokens", tokens],
  trajectories: ["Trajectories", trajectories],
  evaluations: ["Evaluations", evaluations],
  setup: ["Setup", setup],
};
const frame = document.getElementById("page");
const FOCUSABLE = "a[href], button, input, select, summary, [tabindex]";
const RETRY_MS = 5000;
let lost = false;
let shown = "";

function header(all, now) {
  const chosen = runOf(all, now);
  const run = all.runs[chosen];
  const view = viewOf(now);
  return [
    h("header", {},
      h("div", { class: "title" }, h("span", { class: "brand" }, "rlsys"), h("h1", {}, all.runs.length > 1 ? plural(all.runs.length, "run") : run.name), all.runs.length === 1 && badge(run)),
      all.runs.length > 1 && h("div", { class: "runs", role: "group", "aria-label": "Run whose details are shown" }, all.runs.map((one, number) =>
        h("button", { type: "button", id: `run-${number}`, "aria-pressed": String(number === chosen), onclick: () => go({ ...(view === "overview" ? {} : { view }), run: number }, []) },
          h("i", { class: "key", style: { background: colourOf(number) } }), one.name, badge(one, true)))),
      !live && all.runs.length === 1 && !["running", "finished"].includes(run.life.phase) && h("p", { class: "lifeline" }, run.life.sentence)),
    h("nav", { "aria-label": "Views" }, Object.entries(VIEWS).map(([name, [title]]) =>
      h("a", { id: `to-${name}`, href: link({ view: name === "overview" ? null : name }), "aria-current": name === view ? "page" : null }, title))),
    live && liveLine(),
  ];
}

const PHASES = { running: ["going", "running at report time"], finished: ["finished", "finished"], failed: ["failed", "failed"], gone: ["failed", "killed"], silent: ["failed", "not responding"], unknown: ["unknown", "unknown"] };

// Badge with the run phase; none for a finished run in a list of several.
function badge(run, brief = false) {
  const { phase } = run.life, [kind, text] = PHASES[phase];
  if (brief && phase === "finished") return null;
  return h("span", { class: `badge ${kind}`, title: run.life.sentence }, phase === "failed" && !brief ? run.status.ended : phase === "running" && live ? "running" : text);
}

// Line with the run's current activity from the latest status, updated every second.
function liveLine() {
  const line = h("p", { class: "live", role: "status" });
  line.tick = () => {
    line.replaceChildren();
    const run = model().runs[runOf(model(), state())], { status } = run;
    if (lost) add(line, h("b", { class: "bad" }, "The server does not answer. This page shows the last data received."));
    else if (!status) add(line, run.steps.length ? "Current activity unknown: the run has no status.json." : "The run has not begun yet.");
    else if (status.ended) add(line, ["The run is over: ", h("b", {}, status.ended), ". ", `Last status: ${date(status.at)}.`]);
    else {
      const silent = Date.now() / 1000 - status.at;
      add(line, h("b", {}, `step ${status.step} of ${status.steps}`));
      for (const [group, one] of Object.entries(status.states ?? {}))
        add(line, h("span", {}, h("b", {}, group), ` ${one.text} `, h("small", {}, since(Date.now() / 1000 - one.since))));
      for (const fault of openFaults(run, status))
        add(line, h("b", { class: "bad" }, `${faultLine(fault)} ${since(Date.now() / 1000 - fault.began_s)} ago`));
      if (silent > 30) add(line, h("b", { class: "bad" }, `The run has written no status for ${since(silent)}.`));
    }
  };
  line.tick();
  return line;
}

// Name that identifies an element across redraws.
function nameOf(element) {
  return element.id || `${element.localName} ${element.getAttribute("aria-label") ?? element.firstElementChild?.textContent ?? element.textContent}`;
}

// Draws and restores the focus: by id, or by name if the view stays the same. If the element is gone, the view gets the focus.
function keepingFocus(draw, same) {
  const before = document.activeElement;
  const held = before !== document.body && frame.contains(before) ? before : null;
  const name = held && nameOf(held);
  draw();
  if (!held || held.isConnected) return;
  const again = (held.id && document.getElementById(held.id)) || (same && [...frame.querySelectorAll(FOCUSABLE)].find((one) => nameOf(one) === name));
  (again || document.getElementById("reading") || document.getElementById("main")).focus({ preventScroll: true });
}

function drawHead(all, now) {
  for (const one of [...frame.children]) if (one.id !== "main") one.remove();
  frame.prepend(...header(all, now).flat().filter(Boolean));
  const nav = frame.querySelector("nav"), here = nav.querySelector("[aria-current]");
  if (here) nav.scrollLeft = here.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;
}

function drawView(all, now) {
  const view = VIEWS[viewOf(now)] ?? VIEWS.overview;
  const body = h("main", { id: "main", tabindex: -1, class: `view-${viewOf(now)}` });
  document.title = visible(`${view[0]} · ${all.runs.map((run) => run.name).join(", ")}`);
  document.getElementById("main")?.remove();
  frame.append(body);
  drawHead(all, now);
  try {
    add(body, view[1](all, now));
  } catch (problem) {
    add(body, h("p", { class: "note bad" }, `This view could not be drawn: ${problem.message}`));
    console.error(problem);
  }
}

function render() {
  const all = model(), now = state(), narrow = innerWidth <= 700 && "trajectory" in now;
  const key = `${viewOf(now)} ${now.run ?? 0} ${narrow}`, same = key === shown;
  const unfolded = same ? new Map([...frame.querySelectorAll("details")].map((one) => [nameOf(one.firstElementChild), one.open])) : new Map();
  const scrolled = scrollY;
  hideTip();
  keepingFocus(() => {
    drawView(all, now);
    for (const one of frame.querySelectorAll("details")) one.open = unfolded.get(nameOf(one.firstElementChild)) ?? one.open;
  }, same);
  if (same) scrollTo(0, scrolled);
  else if (shown) scrollTo(0, 0);
  document.querySelector(".card[aria-current]")?.scrollIntoView({ block: "nearest" });
  shown = key;
}

// Called after new data. Lists being read (trajectories, evaluations) keep their contents and position; other views redraw.
function follows() {
  if (["trajectories", "evaluations"].includes(viewOf(state()))) keepingFocus(() => drawHead(model(), state()), true);
  else render();
}

function tick() {
  for (const line of document.querySelectorAll(".live")) line.tick?.();
}

async function begin() {
  if (live && !frame.querySelector(".bad")) frame.replaceChildren(h("p", { class: "note", role: "status" }, "Reading the run …"));
  try {
    await load();
  } catch (problem) {
    frame.replaceChildren(h("p", { class: "note bad" }, `The data could not be read: ${problem.message}`));
    if (live) setTimeout(begin, RETRY_MS);
    return;
  }
  frame.replaceChildren();
  render();
  addEventListener("hashchange", render);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  // Focus directly instead of following the link, because the address holds the page's state.
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  if (!live) return;
  follow(follows, (now) => ((lost = now), tick()));
  setInterval(tick, 1000);
}

begin();
