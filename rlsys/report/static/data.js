// Loads the page's data from the file itself or from the `rlsys watch` server (data.json, trajectories/N, events). Chunks in
// the file are gzip in base64, unpacked on first use.

const KEPT = 24; // Unpacked chunks in the cache.
const RETRY_MS = 5000;
const own = document.getElementById("model");
const ready = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve();
  else document.addEventListener("DOMContentLoaded", resolve);
});
const unpacked = new Map();
let current = null;

export const live = own === null;

export function model() {
  return current;
}

export async function load() {
  if (own) current = JSON.parse(own.textContent);
  else {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`The server answered ${answer.status}: ${(await answer.text()).slice(0, 300)}`);
    current = await answer.json();
    unpacked.clear();
  }
  return current;
}

// Calls `changed` after new data has arrived, and `lost(true)` while the server does not respond.
export function follow(changed, lost) {
  if (own) return;
  let loading = false, stale = false, missed = false, timer = null;
  const again = async () => {
    stale = true;
    if (loading) return;
    loading = true;
    clearTimeout(timer);
    let came = false;
    try {
      while (stale) {
        stale = false;
        await load();
      }
      came = true;
    } catch {
      timer = setTimeout(again, RETRY_MS);
    }
    loading = false;
    lost(!came);
    if (came) changed();
  };
  const listen = () => {
    const events = new EventSource("events");
    events.addEventListener("change", again);
    events.addEventListener("status", (event) => {
      current.runs[0].status = JSON.parse(event.data);
      lost(false);
    });
    // After a reconnect the server reports only later changes, so load once to catch up.
    events.onopen = () => {
      if (missed) again();
      missed = false;
    };
    events.onerror = () => {
      missed = true;
      lost(true);
      // The browser reconnects by itself unless the response was no event stream.
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
    };
  };
  listen();
}

async function gunzip(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function unpack(number) {
  if (!own) {
    const answer = await fetch(`trajectories/${number}`);
    if (!answer.ok) throw new Error(`chunk ${number} could not be loaded: the server answered ${answer.status}.`);
    return answer.json();
  }
  let part = document.getElementById(`chunk-${number}`);
  if (!part) {
    await ready;
    part = document.getElementById(`chunk-${number}`);
  }
  if (!part) throw new Error(`chunk ${number} is missing: this file is incomplete.`);
  return gunzip(part.textContent);
}

export function chunk(number) {
  let found = unpacked.get(number);
  if (found) unpacked.delete(number);
  else {
    found = unpack(number);
    found.catch(() => unpacked.delete(number));
  }
  unpacked.set(number, found);
  if (unpacked.size > KEPT) unpacked.delete(unpacked.keys().next().value);
  return found;
}

// [chunk number, index within it] of trajectory `number` of a run.
function placeOf(trajectories, number) {
  let before = 0;
  for (const [offset, [, , count]] of trajectories.chunks.entries()) {
    if (number < before + count) return [trajectories.first_chunk + offset, number - before];
    before += count;
  }
  return null;
}

export async function trajectory(trajectories, number) {
  const [part, place] = placeOf(trajectories, number);
  return (await chunk(part))[place];
}
