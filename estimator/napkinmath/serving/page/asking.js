"use strict";
// What happens when: a change asks, an answer is shown, a later question ends an earlier one.
const QUIET_MS = 500; // without another move, before the page asks for what takes longer
const { post } = transport; // of transport.js: a server, or a worker in this browser
const COMMANDS = ["posix", "powershell", "python"];
let firstShown = 0; // milliseconds after the page began, which benchmarks/browsers reads
let asked = 0, latest = null, current = null, timer = 0, waiting = null;

function changed() {
  showFields();
  clearTimeout(timer);
  timer = setTimeout(ask, 30);
}

function settle() { // something was taken over: its answer comes into view
  changed();
  $("verdict").scrollIntoView({ block: "nearest" });
}

async function ask() {
  const mine = ++asked, wanted = options();
  if (waiting) waiting.abort(); // the server drops what nobody waits for
  const { signal } = waiting = new AbortController();
  remember(wanted, kept.map((one) => one.options));
  document.body.classList.add("busy");
  try {
    const answer = await post("/api/estimate", wanted, signal);
    latest = wanted;
    current = { options: wanted, report: answer.report };
    $("error").hidden = true;
    document.body.classList.remove("stale");
    document.body.classList.add("partly"); // what follows is still of the earlier answer
    show(answer);
    firstShown ||= performance.now();
    showCompared(current);
    await showConfig(signal);
    document.body.classList.remove("busy");
    await new Promise((resolve) => setTimeout(resolve, QUIET_MS));
    if (mine === asked) details(await post("/api/details", wanted, signal), answer.report);
    if (mine === asked) await limits(wanted, signal);
  } catch (error) {
    if (mine === asked && !signal.aborted) wrong(error.message);
  } finally {
    if (mine === asked) document.body.classList.remove("busy");
  }
}

async function limits(wanted, signal) { // without them the answer stands
  try { showLimits(await post("/api/limits", wanted, signal)); }
  catch (error) { if (!signal.aborted) $("limits").textContent = `Largest batch and longest context: ${error.message}`; }
}

function wrong(message) { // in words, with the names that it suggests one click away
  const names = [...new Set(message.match(/[\w.-]+/g) || [])].filter((name) => name !== form.model.value && lists.models.some((m) => m.name === name));
  fill($("error"), message, ...names.flatMap((name) => [" ", button(`Use ${name}`, "", () => { form.model.value = name; changed(); })]));
  $("error").hidden = false;
  document.body.classList.add("stale"); // what is shown answers an earlier question
}

async function showConfig(signal) {
  const kind = $("kind").value;
  try {
    const answer = await (COMMANDS.includes(kind) ? post("/api/command", { ...latest, shell: kind }, signal) : post(`/api/export/${kind}`, latest, signal));
    $("config").textContent = answer.text !== undefined ? answer.text + answer.notes.map((n) => `# ${n}\n`).join("") : answer.command;
  } catch (error) { if (error.name !== "AbortError") $("config").textContent = error.message; }
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); $("copied").textContent = `${what} copied`; }
  catch { $("copied").textContent = "copying was not allowed: select the text below"; }
}

async function openOwn(file) {
  try { await opened(file); changed(); } catch (error) { wrong(error.message); }
}

async function restore() { // the page as a link says it
  const found = location.hash.length > 1 ? fromLink(location.hash.slice(1)) : OPENS_ON;
  adopt(found);
  form.price.value = found.price || "";
  changed();
  const others = found.vs || [];
  if (JSON.stringify(others) === JSON.stringify(kept.map((one) => one.options))) return;
  await restoreKept(others);
  changed();
}

function listen() {
  form.addEventListener("input", ({ target }) => {
    if (target.id === "further" || target.type === "file") return; // until it is entered
    if (Object.hasOwn(POWERS, target.id)) slid(target.id);
    else if (target.id.endsWith("-number")) put(target.id.slice(0, -"-number".length), size(target.id.slice(0, -"-number".length)));
    else if (target.name) delete extra[target.name];
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  $("further").addEventListener("change", () => { setFlags($("further").value); $("further").value = ""; changed(); });
  $("extra-clear").addEventListener("click", () => { extra = {}; changed(); });
  $("own-file").addEventListener("change", ({ target }) => { if (target.files.length) openOwn(target.files[0]); target.value = ""; });
  $("own-drop").addEventListener("click", () => { own = null; changed(); });
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); if (event.dataTransfer.files.length) openOwn(event.dataTransfer.files[0]); });
  $("keep").addEventListener("click", () => { if (current) { keep(current.options, current.report); changed(); $("compare-box").scrollIntoView({ block: "nearest" }); } });
  $("kind").addEventListener("change", () => showConfig());
  $("search").addEventListener("click", plan);
  $("copy").addEventListener("click", () => copy($("config").textContent, "text"));
  $("share").addEventListener("click", () => copy(location.href, "link"));
  window.addEventListener("hashchange", restore);
}

async function begin() {
  try { lists = await transport.catalogue(); }
  catch (error) { $("verdict").textContent = ""; return wrong(error.message); }
  fillLists();
  listen();
  await restore();
  setTimeout(fillSuggestions, 2 * QUIET_MS);
}
begin();
