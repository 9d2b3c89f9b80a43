"use strict";
// The answer: verdict and bar at once, the timeline, the formulas and what to change as they come.
const BOUNDS = { "compute": "compute", "bandwidth": "bandwidth", "launch": "launch", "communication": "communication" }; // classes of page.css; the rest is "other"
let rows = [], known = null, opened_key = null;
const choices = { hidden: new Set(), inOrder: false, rows: 8 }; // of the timeline, for the next one
let lastView = null;

function show({ report, notes }) {
  const [words, kind, much] = verdictOf(report);
  $("verdict").textContent = much ? `${words}${kind === "unknown" ? ": " : ", "}${much}` : words;
  $("verdict").className = kind;
  document.title = `${words.split(",")[0]}: ${own ? own.name : report.model.name} \u00b7 napkinmath`;
  $("spare").textContent = report.verdict === "fits" && report.returnable_bytes ? `The allocator's cache could give back ${gib(report.returnable_bytes)} GiB more.` : "";
  fill($("notes"), ...notes.map((note) => make("li", note)));
  $("remedy").hidden = true;
  fill($("figures"), ...["allocated", "reserved", "device"].flatMap((n) => { const d = make("div"); d.append(make("dt", `${n}, GiB${severalOf(report)}`), make("dd", span(report.memory[n]))); return [d]; }));
  components(report.components, report);
  speed(report.time);
}

const gpusOf = (report) => report.time ? report.time.all_gpus.gpus : 1;
const severalOf = (report) => gpusOf(report) > 1 ? " a GPU" : "";

function speed(t) {
  $("speed").textContent = t ? `${lasts(t.seconds)} a step, ${whole(t.all_gpus.tokens_per_s)} tokens/s${t.all_gpus.gpus > 1 ? ` on ${t.all_gpus.gpus} GPUs` : ""}, MFU ${percent(t.mfu)}, HFU ${percent(t.hfu)}` : "Name a GPU for its speed.";
  $("cost").textContent = t && cost(t) ? `$${money(cost(t))} for a million tokens, $${money(1000 * cost(t))} for a billion` : "";
  bounds(t);
}

const cost = (t) => pricePerHour() * t.all_gpus.gpu_hours_per_billion_tokens / 1000; // of a million tokens

function onTheCard({ hardware, memory, headroom }, total) { // bytes of the bar's full width; marks limit and range
  const limit = hardware ? hardware.memory_bytes : 0, scale = Math.max(total, limit, hardware ? memory.device.high : 0);
  const at = (mark, from, to) => { mark.hidden = !limit; mark.style.left = `${100 * from / scale}%`; mark.style.width = `${100 * (to - from) / scale}%`; };
  at($("bar-limit"), limit, limit);
  at($("bar-range"), memory.device.low, memory.device.high);
  $("bar-words").textContent = limit ? `limit ${gib(limit)} GiB, device ${span(memory.device)} GiB${headroom ? `, headroom ${gib(headroom.value)} (${gib(headroom.low)} to ${gib(headroom.high)}) GiB` : ""}` : "no GPU named: the bar is the step's own size";
  return scale;
}

function components(found, report) {
  rows = found;
  known = null;
  reopen();
  const total = rows.reduce((sum, part) => sum + part.nbytes, 0), scale = onTheCard(report, total);
  const bar = [], lines = [];
  for (const part of rows) {
    const colour = lists.colors[part.role];
    const piece = make("span"); // for a pointer; the table below has a button for each
    piece.addEventListener("click", () => formulas(part));
    piece.title = `${part.label}: ${some(part.nbytes)} GiB`;
    piece.style.width = `${100 * part.nbytes / scale}%`;
    piece.style.background = colour;
    if (part.nbytes > 0.004 * scale) bar.push(piece);
    const name = make("td"), opener = button(part.label, "", () => formulas(part));
    opener.prepend(swatch(colour));
    name.append(opener);
    lines.push(row(name, [some(part.nbytes), "number"], [part.origin]));
  }
  fill($("bar"), ...bar);
  $("bar").setAttribute("aria-label", `At the peak: ${rows.filter((part) => part.nbytes > 0.004 * scale).map((part) => `${part.label} ${some(part.nbytes)} GiB`).join(", ")}`);
  fill($("components").tBodies[0], ...lines);
}

function formulas(part, bring = true) {
  opened_key = part.key;
  const entries = known ? known[part.key] || [] : [];
  $("formulas-title").textContent = `${part.label}: ${part.nbytes.toLocaleString("en")} bytes`;
  fill($("formulas").querySelector("ul"), ...(entries.length ? entries.map((e) => { const li = make("li"); li.append(make("code", `${e.nbytes.toLocaleString("en")} B = ${e.formula}`), make("span", e.what, { class: "what" })); return li; }) : [make("li", part.origin)]));
  $("formulas").hidden = false;
  if (bring) $("formulas").scrollIntoView({ block: "nearest" });
}

function reopen() {
  const part = rows.find((r) => r.key === opened_key);
  if (part) formulas(part, false); else $("formulas").hidden = true;
}

function bounds(t) {
  const shares = t ? Object.entries(t.shares).filter(([, share]) => share > 0.002) : [];
  const kind = (name) => BOUNDS[name] || "other";
  fill($("bounds"), ...shares.map(([name, share]) => { const s = make("span", undefined, { title: `${name} ${percent(share)}`, class: kind(name) }); s.style.width = `${100 * share}%`; return s; }));
  fill($("bounds-legend"), ...(shares.length ? ["bound by "] : []), ...shares.map(([name, share]) => { const s = make("span", undefined, { class: "entry" }); s.append(make("span", undefined, { class: `swatch ${kind(name)}`, "aria-hidden": "true" }), `${name} ${percent(share)} `); return s; }));
  fill($("phases").tBodies[0], ...(t && t.phases || []).map((p) => row([p.phase || p.name], [lasts(p.seconds), "number"], [p.bound || ""])));
  $("phases").hidden = !t;
}

function details(more, report) {
  known = more.formulas;
  document.body.classList.remove("partly");
  $("limits").textContent = "";
  reopen();
  timeline(more.timeline);
  $("roofline-box").hidden = !more.roofline_svg;
  if (more.roofline_svg) $("roofline").src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(more.roofline_svg);
  fill($("operations"), ...more.operations.map((o) => { const li = make("li"); li.append(make("code", `${(1e3 * o.seconds).toPrecision(3)} ms ${o.phase}: ${o.formula}`), make("span", o.what, { class: "what" })); return li; }));
  remedy(more.remedy, report);
  const line = (c) => {
    const first = make("td", c.meaning), last = make("td");
    first.append(make("span", c.flag, { class: "what" }));
    last.append(button("Use", `Use ${c.flag}`, () => { setFlags(c.flag); settle(); }));
    return row(first, [gib(c.saved_bytes), "number"], [c.speed_ratio ? change(c.speed_ratio) : "", "number"], last);
  };
  fill($("changes").tBodies[0], ...more.changes.map(line));
  $("changes").hidden = !more.changes.length;
  fill($("findings"), ...more.findings.map((f) => make("li", f.text)));
  const fitting = more.fits_on.filter((f) => f.verdict === "fits").map((f) => f.headroom_bytes === null ? f.gpu : `${f.gpu} (+${gib(f.headroom_bytes)})`);
  $("fits").textContent = fitting.slice(0, 12).join(", ") + (fitting.length > 12 ? ` and ${fitting.length - 12} larger ones` : "") || "none of the catalogued GPUs alone";
}

function remedy(found, report) { // what would fit, one click away
  if (report.verdict === "fits" || !report.hardware) return;
  $("remedy").hidden = false;
  if (!found) return fill($("remedy"), "No set of the changes tried is enough on this GPU; \u201cWhat should I run?\u201d below searches wider.");
  const flags = found.flags.join(" ");
  fill($("remedy"), button("Make it fit", `Make it fit: ${flags}`, () => { setFlags(flags); settle(); }), " ", make("code", flags), ` leaves ${gib(found.headroom_bytes)} GiB${found.speed_ratio ? `, speed ${change(found.speed_ratio)}` : ""}`);
}

function timeline(data) { // drawn once it comes near the window: a phone opens above it
  if (lastView) lastView.abort();
  const { signal } = lastView = new AbortController();
  const near = new IntersectionObserver((seen) => {
    if (!seen.some((entry) => entry.isIntersecting)) return;
    near.disconnect();
    timelineView($("timeline"), data, choices, signal);
  }, { rootMargin: "200px" });
  near.observe($("timeline"));
  signal.addEventListener("abort", () => near.disconnect());
}

function showLimits(limits) {
  const of = [["batch", "Largest batch at this context"], ["context", "Longest context at this batch"]];
  $("limits").textContent = of.filter(([what]) => what in limits)
    .map(([what, words]) => `${words}: ${limits[what].toLocaleString("en")}.`).join(" ");
}
