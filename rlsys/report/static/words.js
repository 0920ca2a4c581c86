// Words and marks shared by several views.

import { h } from "./dom.js";

export const FINISHES = { answer: "answered", turn_limit: "turn limit", token_limit: "token limit", aborted: "cut off" };

export function verdict(right) {
  return h("span", { class: right ? "verdict right" : "verdict wrong" }, right ? "✓" : "✗", h("span", { class: "hidden" }, right ? "right" : "wrong"));
}

// Buttons for the previous and next page of a list; none for a single page.
export function pager(page, pages, turned) {
  const to = (text, number, label) => h("button", { type: "button", "aria-label": label, disabled: number < 0 || number >= pages, onclick: () => turned(number) }, text);
  return pages > 1 ? [to("‹", page - 1, "previous page"), h("span", {}, `page ${page + 1} of ${pages.toLocaleString("en")}`), to("›", page + 1, "next page")] : [];
}
