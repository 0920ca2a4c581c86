// Setup of the run: settings, machine, package versions, and each launch or resume.

import { h, table } from "./dom.js";
import { date } from "./format.js";
import { differences } from "./overview.js";
import { note, runOf } from "./state.js";

const COMMIT = 12; // Characters of a commit hash that are shown.

export function setup(all, now) {
  const run = all.runs[runOf(all, now)];
  return [
    all.runs.length > 1 && h("section", {}, h("h2", {}, "Settings that differ"), differences(all.runs)),
    all.runs.length > 1 && h("section", {}, h("h2", {}, "Environment that differs"), environments(all.runs)),
    lives(run),
    settings(run, now),
    h("section", {}, h("h2", {}, "This report"), h("p", { class: "soft" }, `Made ${date(all.made)} from ${run.path}.`),
      run.problems.length > 0 && h("ul", {}, run.problems.map((text) => h("li", {}, text)))),
  ];
}

// Values of all launches of a run, in order. A run without run.json is not compared.
function environments(runs) {
  const known = runs.filter((run) => run.lives.length);
  if (known.length < 2) return h("p", { class: "note" }, "Nothing to compare: at most one of the runs has a run.json.");
  const values = (life) => ({ commit: life.commit ? life.commit.slice(0, COMMIT) + (life.changed ? " with changes" : "") : "unknown", ...life.environment });
  const text = (run, name) => (run.lives.length ? [...new Set(run.lives.map((life) => values(life)[name] ?? "absent"))].join(", then ") : "not known");
  const names = [...new Set(known.flatMap((run) => run.lives.flatMap((life) => Object.keys(values(life)))))];
  const apart = names.filter((name) => new Set(known.map((run) => text(run, name))).size > 1);
  if (!apart.length) return h("p", { class: "soft" }, "None: machine, versions and commit are the same.");
  return table(["", ...runs.map((run) => run.name)], apart.map((name) => [h("code", {}, name), ...runs.map((run) => h("code", {}, text(run, name)))]), { label: "Environment that differs", text: true, class: "keys" });
}

function lives(run) {
  if (!run.lives.length) return h("section", {}, h("h2", {}, "Where it ran"), h("p", { class: "note" }, "run.json is missing: machine, versions, commit and command are unknown."));
  return h("section", {}, h("h2", {}, run.lives.length > 1 ? `Launched ${run.lives.length} times` : "Where it ran"), run.lives.map((life, place) => {
    const before = run.lives[place - 1]?.environment ?? {};
    const rows = Object.entries(life.environment).filter(([name, value]) => !place || before[name] !== value);
    return h("div", { class: "life" },
      h("h3", {}, life.after_step ? `${date(life.begun)}, resumed after step ${life.after_step}` : date(life.begun)),
      h("pre", { class: "command" }, life.command.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ")),
      h("dl", { class: "pairs" },
        h("dt", {}, "commit"), h("dd", {}, life.commit ? h("code", {}, life.commit) : "not known", life.changed && h("b", { class: "bad" }, " with uncommitted changes")),
        rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
        place > 0 && !rows.length && [h("dt", {}, "environment"), h("dd", {}, "as before")]));
  }));
}

function settings(run, now) {
  const keys = Object.keys(run.config);
  if (!keys.length) return h("section", {}, h("h2", {}, "Settings"), h("p", { class: "note" }, "config.yaml could not be read."));
  const found = h("div", {});
  const changed = new Set(run.changed);
  const draw = (text, all) => {
    const shown = keys.filter((key) => (all || changed.has(key)) && `${key} ${JSON.stringify(run.config[key])}`.toLowerCase().includes(text.toLowerCase().trim()));
    const parts = Object.groupBy(shown, (key) => (key.includes(".") ? key.split(".")[0] : "run"));
    found.replaceChildren(...Object.entries(parts).map(([part, some]) => h("details", { open: text !== "" || innerWidth > 700 }, h("summary", {}, h("h3", {}, part)),
      table(null, some.map((key) => [h("code", {}, key), h("code", { class: "value" }, JSON.stringify(run.config[key]))]), { label: `Settings of ${part}`, text: true, class: "settings" }))));
  };
  const words = h("input", { type: "search", id: "key", placeholder: "lr, staleness …", value: now.key ?? "", oninput: redraw });
  const which = h("select", { id: "which", onchange: redraw }, [["all", `all ${keys.length}`], ["changed", `the ${changed.size} that differ from the default`]].map(([value, text]) => h("option", { value, selected: value === (now.which ?? "all") }, text)));
  function redraw() {
    note({ key: words.value, which: which.value === "all" ? null : which.value });
    draw(words.value, which.value === "all");
  }
  draw(words.value, now.which !== "changed");
  return h("section", {}, h("h2", {}, "Settings"), h("div", { class: "filters" }, h("label", {}, "Keys and values", words), h("label", {}, "Shown", which)), h("div", { class: "columns" }, found));
}
