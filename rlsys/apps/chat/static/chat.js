// The page of `rlsys chat`. Text from the server is untrusted and set as textContent, never as HTML.

const FINISHES = {
  turn_limit: "No answer: turn limit reached.",
  token_limit: "No answer: token limit reached.",
  time_limit: "No answer: time limit reached.",
  aborted: "No answer: the engine aborted the request.",
};

const byId = (id) => document.getElementById(id);
const [form, question, temperature, send, stop, answers, live] = [
  "ask", "question", "temperature", "send", "stop", "answers", "live",
].map(byId);
let running = null; // AbortController of the current answer.

function add(parent, tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const counted = (number, one, many) => `${number} ${number === 1 ? one : many}`;

/** One question and its answer; has a method for each kind of event. */
class Answer {
  constructor(text) {
    this.article = add(answers, "article");
    add(this.article, "h2", "", text);
    this.said = null; // Element for generated text; any other event ends it.
    this.piece = null;
    this.over = false;
  }

  text({ kind, text }) {
    this.said ??= add(this.article, "div", "said");
    if (this.piece?.className !== kind) this.piece = add(this.said, "span", kind, "");
    this.piece.append(text);
  }

  block(tag, className, text) {
    this.said = this.piece = null;
    return add(this.article, tag, className, text);
  }

  asked() {}

  acted() {}

  found({ query, passages, error }) {
    if (error) {
      this.block("p", "wrong", `The search failed: ${error}`);
      return;
    }
    const details = this.block("details");
    add(details, "summary", "", `${counted(passages.length, "passage", "passages")} for “${query}”`);
    const list = add(details, "ol");
    for (const { title, text } of passages) {
      const item = add(list, "li");
      add(item, "span", "title", title);
      item.append(` ${text}`);
    }
    this.searched = true;
  }

  observed({ text }) {
    if (!this.searched) this.block("div", "said", text.trim());
    this.searched = false;
  }

  ended({ answer, finish, searches, tool_calls, tokens, seconds }) {
    const result = answer === null ? FINISHES[finish] : `Answer: ${answer}`;
    this.block("p", answer === null ? "result wrong" : "result answer", result);
    const figures = [counted(searches, "search", "searches")];
    if (tool_calls) figures.push(counted(tool_calls, "tool call", "tool calls"));
    figures.push(counted(tokens, "token", "tokens"), `${seconds.toFixed(1)} s`);
    add(this.article, "p", "figures", figures.join(", "));
    this.end(result);
  }

  failed({ reason, code }) {
    const said = code ? `${reason} [${code}]` : reason;
    this.block("p", "result wrong", said);
    this.end(said);
  }

  end(result) {
    this.over = true;
    live.textContent = result;
  }
}

/** An error to show to the user; any other error is a bug of this page. */
class Told extends Error {}

const orTell = (sentence) => (problem) => {
  throw problem.name === "AbortError" ? problem : new Told(sentence);
};

/** The data of each server-sent event of a response. */
async function* eventsOf(response) {
  const decoder = new TextDecoder();
  let held = "";
  const reader = response.body.getReader(); // Not every browser can iterate over a body.
  while (true) {
    const { done, value } = await reader.read().catch(orTell("The server has stopped: start it again."));
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const messages = held.split("\n\n");
    held = messages.pop();
    for (const message of messages) yield JSON.parse(message.slice("data: ".length));
  }
}

function nearEnd() {
  return window.innerHeight + window.scrollY > document.body.scrollHeight - 80;
}

async function ask(text) {
  const answer = new Answer(text);
  answer.article.scrollIntoView({ block: "start" });
  running = new AbortController();
  busy(true);
  try {
    const heat = temperature.value === "" ? null : Number(temperature.value);
    const response = await fetch("ask", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ question: text, temperature: heat }),
      signal: running.signal,
    }).catch(orTell("The server does not answer: start it again."));
    if (!response.ok) answer.failed({ reason: (await response.json()).detail });
    else {
      for await (const event of eventsOf(response)) {
        const follow = nearEnd();
        answer[event.event](event);
        if (follow) window.scrollTo(0, document.body.scrollHeight);
      }
      if (!answer.over) answer.failed({ reason: "The server has stopped: start it again." });
    }
  } catch (problem) {
    if (problem.name === "AbortError") answer.failed({ reason: "Stopped." });
    else if (problem instanceof Told) answer.failed({ reason: problem.message });
    else answer.failed({ reason: `This page has failed: ${problem.message}` });
  } finally {
    running = null;
    busy(false);
  }
}

function busy(is) {
  send.disabled = is;
  stop.disabled = !is;
  if (!is) question.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value;
  if (running || !temperature.reportValidity()) return;
  question.value = "";
  ask(text);
});
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
stop.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

const about = await (await fetch("about")).json();
const search = about.search ? `up to ${about.max_turns} searches at ${about.search}` : "without searches";
byId("about").textContent = `${about.model} · ${about.engine} · ${search}`;
temperature.placeholder = String(about.temperature);
