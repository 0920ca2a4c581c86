// What is shown, in the address behind "#", so that any view can be linked to and the back button works.

export function state() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function link(changes, keep = ["run"]) {
  const now = state();
  const next = new URLSearchParams();
  for (const name of keep) if (name in now) next.set(name, now[name]);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") next.delete(name);
    else next.set(name, value);
  }
  return "#" + next.toString();
}

export function go(changes, keep) {
  location.hash = link(changes, keep);
}

// The same without a step of the back button and without a new view; for what is typed.
export function note(changes) {
  history.replaceState(null, "", link(changes, Object.keys(state())));
}

// A link to one trajectory alone, "#trajectory=7", names the view that shows it.
export function viewOf(now) {
  return now.view ?? ("trajectory" in now ? "trajectories" : "evaluation" in now ? "evaluations" : "overview");
}

export function runOf(model, now) {
  const number = Number(now.run ?? 0);
  return model.runs[number] ? number : 0;
}
