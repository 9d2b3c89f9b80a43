"use strict";
const GIB = 2 ** 30;
const COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#bab0ac", "#2f8f83", "#d37295", "#3d5a98", "#b6992d", "#8cd17d", "#79706e"];
const POWERS = { bs: 2, ctx: 2, rank: 2, grad_accum: 2 };
const $ = (id) => document.getElementById(id);
const form = $("form");
const QUIET_MS = 500; // without another move, before the page asks for what takes longer
const SELECTS = [...form.querySelectorAll("[data-list]")].map((select) => select.name);
let asked = 0, latest = null, timer = 0, waiting = null;
let extra = {}; // options without a field here, from a link, a row of the plan or a change

const gib = (bytes) => (bytes / GIB).toFixed(2);
const some = (bytes) => bytes > 0 && bytes < 0.005 * GIB ? "<0.01" : gib(bytes);
const lasts = (s) => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} \u00b5s`;
const span = (r) => `${gib(r.value)} (${gib(r.low)}\u2013${gib(r.high)})`;
const make = (tag, text, attributes = {}) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); return e; };
const fill = (parent, ...children) => parent.replaceChildren(...children);

const exact = (name) => $(`${name}-number`);
const size = (name) => exact(name).value === "" ? "" : Number(exact(name).value);

function slid(name) { // a slider was moved: the exact value follows
  const value = POWERS[name] ** Number(form[name].value);
  exact(name).value = name === "ctx" ? Math.round(value / 32) * 32 : Math.round(value);
}

function put(name, value) { // an exact value was given: the slider follows as well as it can
  exact(name).value = value;
  if (value > 0) form[name].value = Math.log(value) / Math.log(POWERS[name]);
}

function options() {
  const found = extra.arch ? {} : { model: form.model.value.trim() };
  if (form.gpu.value) found.gpu = form.gpu.value;
  found.method = form.elements.method.value;
  for (const name of ["bs", "ctx", "grad_accum"]) found[name] = size(name);
  if (form.elements.method.value !== "full") found.rank = size("rank");
  for (const name of SELECTS) if (form[name].value) found[name] = form[name].value;
  return { ...found, ...extra };
}

function restore() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (location.hash.length < 2) return;
  for (const name of SELECTS) form[name].value = "";
  form.gpu.value = "";
  extra = {};
  for (const [name, value] of wanted) set(name, read(value));
}

function read(text) { // a value as it stands in a link or a command
  return text === "true" ? true : text === "false" ? false : /^[0-9]{1,9}$/.test(text) ? Number(text) : text;
}

function set(name, value) { // one option, into its field if it has one
  const field = Object.hasOwn(POWERS, name) || SELECTS.includes(name) || ["model", "gpu", "method"].includes(name) ? form.elements[name] : null;
  if (Object.hasOwn(POWERS, name)) put(name, value);
  else if (!field) extra[name] = value;
  else {
    field.value = value;
    if (field.value !== String(value)) extra[name] = value; // a value its list does not have
  }
}

function remember(found) {
  const link = new URLSearchParams();
  for (const [name, value] of Object.entries(found)) link.set(name, value);
  history.replaceState(null, "", "#" + link);
}

const { post } = transport; // of transport.js: a server, or a worker in this browser

function changed() {
  for (const name of Object.keys(POWERS)) form[name].setAttribute("aria-valuetext", size(name).toLocaleString("en"));
  form.rank.disabled = exact("rank").disabled = form.elements.method.value === "full";
  $("extra").hidden = !Object.keys(extra).length;
  // Not as flags: commands are the server's to make, which quotes their words.
  $("extra-text").textContent = Object.entries(extra).map(([name, value]) => `${name}: ${value === true ? "on" : value === false ? "off" : value}`).join(", ");
  clearTimeout(timer);
  timer = setTimeout(ask, 30);
}

async function ask() {
  const mine = ++asked, wanted = options();
  if (waiting) waiting.abort(); // the server drops what nobody waits for
  const { signal } = waiting = new AbortController();
  remember(wanted);
  document.body.classList.add("busy");
  try {
    const answer = await post("/api/estimate", wanted, signal);
    latest = wanted;
    $("error").hidden = true;
    document.body.classList.remove("stale");
    show(answer);
    await showConfig(signal);
    document.body.classList.remove("busy");
    await new Promise((resolve) => setTimeout(resolve, QUIET_MS));
    if (mine === asked) details(await post("/api/details", wanted, signal));
    if (mine === asked) showLimits(await post("/api/limits", wanted, signal));
  } catch (error) {
    if (mine !== asked || signal.aborted) return;
    $("error").textContent = error.message;
    $("error").hidden = false;
    document.body.classList.add("stale"); // what is shown answers an earlier question
  } finally {
    if (mine === asked) document.body.classList.remove("busy");
  }
}

function show({ report }) {
  const machine = report.hardware ? ` ${report.hardware.gpu}, ${gib(report.hardware.memory_bytes)} GiB` : "";
  const words = { "fits": ["FITS", "fits"], "does not fit": ["DOES NOT FIT", "not"], "cannot tell": ["CANNOT TELL", "unknown"], "no device named": ["no GPU named", ""] }[report.verdict];
  $("verdict").textContent = `${words[0]}${machine}${spare(report)}`;
  $("verdict").className = words[1];
  $("spare").textContent = report.verdict === "fits" && report.returnable_bytes ? `The allocator's cache could give back ${gib(report.returnable_bytes)} GiB more.` : "";
  fill($("figures"), ...["allocated", "reserved", "device"].flatMap((n) => { const d = make("div"); d.append(make("dt", `${n}, GiB`), make("dd", span(report.memory[n]))); return [d]; }));
  components(report.components, report);
  const t = report.time;
  $("speed").textContent = t ? `${lasts(t.seconds)} a step, ${Math.round(t.tokens_per_s).toLocaleString("en")} tokens/s, MFU ${(100 * t.mfu).toFixed(0)}%, HFU ${(100 * t.hfu).toFixed(0)}%` : "Name a GPU for its speed.";
  bounds(t);
}

function spare({ headroom, verdict }) {
  if (!headroom) return "";
  if (verdict === "cannot tell" && headroom.low < 0 && headroom.high > 0) return `: between ${gib(-headroom.low)} GiB too much and ${gib(headroom.high)} GiB to spare`;
  return `, ${gib(Math.abs(headroom.value))} GiB ${headroom.value < 0 ? "too much" : "to spare"}`;
}

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
  const total = rows.reduce((sum, row) => sum + row.nbytes, 0), scale = onTheCard(report, total);
  const bar = [], lines = [];
  rows.forEach((row, index) => {
    const colour = COLOURS[index % COLOURS.length];
    const piece = make("button", undefined, { type: "button", title: `${row.label}: ${some(row.nbytes)} GiB`, "aria-label": `${row.label}, ${some(row.nbytes)} GiB: formulas` });
    piece.style.width = `${100 * row.nbytes / scale}%`;
    piece.style.background = colour;
    piece.addEventListener("click", () => formulas(row));
    if (row.nbytes > 0.004 * scale) bar.push(piece);
    const line = make("tr"), name = make("td"), opener = make("button", row.label, { type: "button" }), swatch = make("span", undefined, { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = colour;
    opener.addEventListener("click", () => formulas(row));
    opener.prepend(swatch);
    name.append(opener);
    line.append(name, make("td", some(row.nbytes), { class: "number" }), make("td", row.origin));
    lines.push(line);
  });
  fill($("bar"), ...bar);
  fill($("components").tBodies[0], ...lines);
}

let known = null, opened = null, rows = [];
function formulas(row, bring = true) {
  opened = row.key;
  const entries = known ? known[row.key] || [] : [];
  $("formulas-title").textContent = `${row.label}: ${row.nbytes.toLocaleString("en")} bytes`;
  fill($("formulas").querySelector("ul"), ...(entries.length ? entries.map((e) => { const li = make("li"); li.append(make("code", `${e.nbytes.toLocaleString("en")} B = ${e.formula}`), make("span", e.what, { class: "what" })); return li; }) : [make("li", row.origin)]));
  $("formulas").hidden = false;
  if (bring) $("formulas").scrollIntoView({ block: "nearest" });
}

function reopen() {
  const row = rows.find((r) => r.key === opened);
  if (row) formulas(row, false); else $("formulas").hidden = true;
}

function bounds(t) {
  if (!t) { $("bounds-legend").textContent = ""; fill($("bounds")); fill($("phases").tBodies[0]); return; }
  const shares = Object.entries(t.bound_shares || t.shares || {}).filter(([, share]) => share > 0.002);
  fill($("bounds"), ...shares.map(([name, share], index) => { const s = make("span", undefined, { title: `${name} ${(100 * share).toFixed(0)}%` }); s.style.width = `${100 * share}%`; s.style.background = COLOURS[index]; return s; }));
  fill($("bounds-legend"), "bound by ", ...shares.flatMap(([name, share], index) => { const s = make("span", undefined, { class: "swatch", "aria-hidden": "true" }); s.style.background = COLOURS[index]; return [index ? "\u2003" : "", s, `${name} ${(100 * share).toFixed(0)}%`]; }));
  fill($("phases").tBodies[0], ...(t.phases || []).map((p) => { const tr = make("tr"); tr.append(make("td", p.phase || p.name), make("td", lasts(p.seconds), { class: "number" }), make("td", p.bound || "")); return tr; }));
}

function details(more) {
  known = more.formulas;
  reopen();
  $("timeline").src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(more.timeline_svg);
  $("timeline").hidden = false;
  $("roofline").hidden = !more.roofline_svg;
  if (more.roofline_svg) $("roofline").src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(more.roofline_svg);
  fill($("operations"), ...more.operations.map((o) => { const li = make("li"); li.append(make("code", `${(1e3 * o.seconds).toPrecision(3)} ms ${o.phase}: ${o.formula}`), make("span", o.what, { class: "what" })); return li; }));
  const change = (meaning, flags, saved, ratio) => { const tr = make("tr"), first = make("td", meaning); first.append(make("span", flags, { class: "what" })); tr.append(first, make("td", saved, { class: "number" }), make("td", ratio ? percent(ratio - 1) : "", { class: "number" }), user(`Use ${flags}`, () => { setFlags(flags); settle(); })); return tr; };
  const enough = more.remedy ? [change(`enough to fit, with ${gib(more.remedy.headroom_bytes)} GiB to spare`, more.remedy.flags.join(" "), "", more.remedy.speed_ratio)] : [];
  fill($("changes").tBodies[0], ...enough, ...more.changes.map((c) => change(c.meaning, c.flag, gib(c.saved_bytes), c.speed_ratio)));
  fill($("findings"), ...more.findings.map((f) => make("li", f.text)));
  const fitting = more.fits_on.filter((f) => f.verdict === "fits").map((f) => f.headroom_bytes === null ? f.gpu : `${f.gpu} (+${gib(f.headroom_bytes)})`);
  $("fits").textContent = fitting.slice(0, 12).join(", ") + (fitting.length > 12 ? ` and ${fitting.length - 12} larger ones` : "") || "none of the catalogued GPUs alone";
}

function percent(share) {
  return Math.abs(share) < 0.005 ? "same" : `${(100 * share).toFixed(0)}%`;
}

function user(label, use) { // a cell with a button that takes a row over
  const cell = make("td"), button = make("button", "Use", { type: "button", "aria-label": label });
  button.addEventListener("click", use);
  cell.append(button);
  return cell;
}

let lists = { shorthands: {}, aliases: {} }; // of the catalogue
function setFlags(flags) { // "--bs 2 --targets 'q_proj, v_proj'" into the fields
  for (const [, no, flag, value] of flags.matchAll(/(?<!\S)--(no-)?([a-z0-9-]+)(?:[\s=]+('[^']*'|"[^"]*"|[^-\s]\S*))?/g)) {
    const word = flag.replaceAll("-", "_"), name = Object.hasOwn(lists.aliases, word) ? lists.aliases[word] : word, short = Object.hasOwn(lists.shorthands, name) ? lists.shorthands[name] : null;
    if (short) set(...short);
    else if (name === "train_mode") delete extra.eval;
    else set(name, value === undefined ? !no : read(value.replace(/^(['"])(.*)\1$/, "$2")));
  }
}

function settle() {
  changed();
  $("verdict").scrollIntoView({ block: "nearest" });
}

function showLimits(limits) {
  $("limits").textContent = "batch" in limits ? `Largest batch at this context: ${limits.batch.toLocaleString("en")}. Longest context at this batch: ${limits.context.toLocaleString("en")}.` : "";
}

async function plan() {
  const wanted = { ...options(), goal: $("goal").value };
  if ($("plan-method").value) delete wanted.method, delete wanted.rank;
  $("search").disabled = true;
  $("plan-said").textContent = "searching\u2026";
  try { showPlan(await post("/api/plan", wanted)); }
  catch (error) { $("plan").hidden = true; $("plan-said").textContent = error.message; }
  finally { $("search").disabled = false; }
}

function showPlan(found) {
  $("plan-said").textContent = `${found.num_candidates ? `${found.num_candidates.toLocaleString("en")} candidates priced, ${found.num_verified} replayed in the allocator` : `${found.num_verified} meshes that fit`}${found.best.length ? "" : ": nothing fits"}`;
  $("plan").hidden = !found.best.length;
  fill($("plan").tBodies[0], ...found.best.map((row) => {
    const line = make("tr"), last = user(`Use batch ${row.options.bs}, ${row.changes.join(", ") || "as it is"}`, () => take(row.options));
    line.append(...[row.options.bs, row.options.ctx.toLocaleString("en"), gib(row.device_bytes), gib(row.headroom_bytes), row.tokens_per_s ? Math.round(row.tokens_per_s).toLocaleString("en") : ""].map((v) => make("td", String(v), { class: "number" })), make("td", row.changes.join(" ") || "(as it is)"), last);
    return line;
  }));
}

function take(chosen) {
  for (const name of SELECTS) form[name].value = "";
  form.elements.method.value = "full";
  for (const [name, value] of Object.entries(chosen)) if ((value !== false || name === "clip") && name !== "model" && name !== "gpu") set(name, value);
  settle();
}

async function showConfig(signal) {
  const kind = $("kind").value;
  try {
    const isCommand = kind === "" || kind === "powershell";
    const answer = isCommand ? await post("/api/command", kind ? { ...latest, shell: kind } : latest, signal) : await post(`/api/export/${kind}`, latest, signal);
    $("config").textContent = answer.text !== undefined ? answer.text + answer.notes.map((n) => `# ${n}\n`).join("") : answer.command;
  } catch (error) { if (error.name !== "AbortError") $("config").textContent = error.message; }
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); $("copied").textContent = `${what} copied`; }
  catch { $("copied").textContent = "copying was not allowed: select the text below"; }
}

async function begin() {
  try { lists = await transport.catalogue(); }
  catch (error) { $("verdict").textContent = ""; $("error").textContent = error.message; $("error").hidden = false; return; }
  fill($("models"), ...lists.models.map((m) => make("option", `${(m.parameters / 1e9).toFixed(2)}B`, { value: m.name })));
  $("gpu").append(...lists.gpus.map((g) => make("option", `${g.name} (${gib(g.memory_bytes)} GiB)`, { value: g.name })));
  for (const select of form.querySelectorAll("[data-list]")) select.append(...lists.choices[select.name].map((v) => make("option", v, { value: v })));
  $("kind").append(...lists.exports.map((v) => make("option", v, { value: v })));
  form.gpu.value = "RTX 4090";
  restore();
  form.addEventListener("input", ({ target }) => {
    if (target.id === "further") return; // until it is entered
    if (Object.hasOwn(POWERS, target.id)) slid(target.id);
    else if (target.id.endsWith("-number")) put(target.id.slice(0, -"-number".length), size(target.id.slice(0, -"-number".length)));
    changed();
  });
  $("further-names").append(...lists.options.map((v) => make("option", undefined, { value: `--${v.replaceAll("_", "-")} ` })));
  $("further").addEventListener("change", () => { setFlags($("further").value); $("further").value = ""; changed(); });
  $("extra-clear").addEventListener("click", () => { extra = {}; changed(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  $("kind").addEventListener("change", () => showConfig());
  $("search").addEventListener("click", plan);
  $("copy").addEventListener("click", () => copy($("config").textContent, "text"));
  $("share").addEventListener("click", () => copy(location.href, "link"));
  window.addEventListener("hashchange", () => { restore(); changed(); });
  changed();
}
begin();
