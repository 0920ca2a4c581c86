// Page state, kept in the address after "#", so that any view can be linked to and the back button works.

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

// Like `go`, but without a history entry or a redraw; for typed input.
export function note(changes) {
  history.replaceState(null, "", link(changes, Object.keys(state())));
}

// The view in the address. A link such as "#trajectory=7" alone implies its view.
export function viewOf(now) {
  return now.view ?? ("trajectory" in now ? "trajectories" : "evaluation" in now ? "evaluations" : "overview");
}

export function runOf(model, now) {
  const number = Number(now.run ?? 0);
  return model.runs[number] ? number : 0;
}
