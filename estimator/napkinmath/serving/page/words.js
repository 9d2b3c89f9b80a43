"use strict";
// Figures as words, and elements from text; nothing here knows what is on the page.
const GIB = 2 ** 30;
const $ = (id) => document.getElementById(id);
const gib = (bytes) => (bytes / GIB).toFixed(2);
const some = (bytes) => bytes > 0 && bytes < 0.005 * GIB ? "<0.01" : gib(bytes);
const lasts = (s) => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} \u00b5s`;
const span = (r) => `${gib(r.value)} (${gib(r.low)}\u2013${gib(r.high)})`;
const whole = (number) => Math.round(number).toLocaleString("en");
const money = (amount) => amount >= 100 ? whole(amount) : amount >= 1 ? amount.toFixed(2) : amount.toPrecision(2);
const percent = (share) => `${(100 * share).toFixed(0)}%`;
const change = (ratio) => Math.abs(ratio - 1) < 0.005 ? "same" : `${ratio > 1 ? "+" : "\u2212"}${(100 * Math.abs(ratio - 1)).toFixed(0)}%`;
const fill = (parent, ...children) => parent.replaceChildren(...children);

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function button(text, label, use) { // `label` is what a screen reader says
  const made = make("button", text, { type: "button", ...(label ? { "aria-label": label } : {}) });
  made.addEventListener("click", use);
  return made;
}

function swatch(colour) {
  const made = make("span", undefined, { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}

function row(...cells) { // a cell is an element, or [text, class]
  const line = make("tr");
  line.append(...cells.map((cell) => Array.isArray(cell) ? make("td", cell[0], cell[1] ? { class: cell[1] } : {}) : cell));
  return line;
}

function verdictOf({ verdict, headroom, hardware }) { // [words, class, how much]
  const [words, kind] = { "fits": ["FITS", "fits"], "does not fit": ["DOES NOT FIT", "not"], "cannot tell": ["CANNOT TELL", "unknown"], "no device named": ["no GPU named", ""] }[verdict];
  return [hardware ? `${words} ${hardware.gpu}, ${gib(hardware.memory_bytes)} GiB` : words, kind, spare(headroom, verdict)];
}

function spare(headroom, verdict) {
  if (!headroom) return "";
  if (verdict === "cannot tell" && headroom.low < 0 && headroom.high > 0) return `between ${gib(-headroom.low)} GiB too much and ${gib(headroom.high)} GiB to spare`;
  return `${gib(Math.abs(headroom.value))} GiB ${headroom.value < 0 ? "too much" : "to spare"}`;
}
