// Creates elements and text. Untrusted content (of models, web pages, data sets) is inserted as text only: no module of this
// page parses markup. Characters without a glyph, such as controls and bidi marks, are spelled out.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const SVG = "http://www.w3.org/2000/svg";

function spelled(char) {
  if (char === "\n" || char === "\t") return char;
  const hex = char.codePointAt(0).toString(16);
  return hex.length > 4 ? "\\U" + hex.padStart(8, "0") : hex.length > 2 ? "\\u" + hex.padStart(4, "0") : "\\x" + hex.padStart(2, "0");
}

export function visible(text) {
  return String(text).replace(HIDDEN, spelled);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

// h("p", {class: "note", onclick: f}, "text", element, [more])
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

// Text cells are numbers, aligned right; elements and the first column are aligned left. `text: true` aligns all left.
export function table(heads, rows, props) {
  const aside = (place) => (place === 0 || props?.text || rows[0]?.[place] instanceof Node ? null : "n");
  const names = [props?.class, props?.text && "text"].filter(Boolean).join(" ");
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": props?.label ?? "table" },
    h("table", { class: names || null },
      heads && h("thead", {}, h("tr", {}, heads.map((head, place) => h("th", { scope: "col", class: aside(place) }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, place) =>
        place === 0 ? h("th", { scope: "row" }, value) : h("td", { class: aside(place) }, value)))))));
}

// Calls `draw(width)` of a box now and whenever its width changes. An error is shown within the box.
const sized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    try {
      target.redraw(contentRect.width);
    } catch (problem) {
      target.replaceChildren(h("p", { class: "note bad" }, `This chart could not be drawn: ${problem.message}`));
      console.error(problem);
    }
  }
});

export function fitted(box, draw) {
  box.redraw = draw;
  sized.observe(box);
  return box;
}

// Steps through `count` parts of a box with the arrow keys: `read(place)` shows one, `leave` hides it.
export function readByKeys(box, count, read, leave) {
  let at = null;
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    at = Math.min(count - 1, Math.max(0, (at ?? (move > 0 ? -1 : count)) + move));
    read(at);
  });
}

// The tooltip beside the pointer or the keyboard's position; one for the whole page.
const tip = h("div", { id: "tip", role: "status", hidden: true });

export function showTip(x, y, lines) {
  if (!tip.isConnected) document.body.append(tip);
  tip.replaceChildren();
  add(tip, lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), margin = 12;
  const left = x + margin + box.width > innerWidth ? x - margin - box.width : x + margin;
  const top = y + margin + box.height > innerHeight ? y - margin - box.height : y + margin;
  tip.style.setProperty("left", Math.max(4, left) + "px");
  tip.style.setProperty("top", Math.max(4, top) + "px");
}

export function hideTip() {
  tip.hidden = true;
}

export function tipRows(title, rows) {
  return [h("strong", {}, title), h("dl", {}, rows.map(([name, value, colour]) => [
    h("dt", {}, colour && h("i", { class: "key", style: { background: colour } }), name), h("dd", {}, value)]))];
}
