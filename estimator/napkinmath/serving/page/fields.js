"use strict";
// The form: what is asked, from fields, links, flags and rows taken over. Commands are the server's to make: it quotes their words.
const POWERS = { bs: 2, ctx: 2, rank: 2, grad_accum: 2 }; // sliders, by the base of their notches
const OPENS_ON = { model: "llama-3.1-8b", gpu: "RTX 4090", method: "qlora", bs: 2, ctx: 2048, rank: 16, grad_accum: 1 };
const MOST_CONFIG_BYTES = 48 * 1024;
const form = $("form");
const SELECTS = [...form.querySelectorAll("[data-list]")].map((select) => select.name);
const COUNTS = [...form.querySelectorAll("[data-count]")].map((field) => field.name);
let lists = { shorthands: {}, aliases: {}, gpus: [], models: [] }; // of the catalogue
let extra = {}; // options without a field here, from a link, a row of the plan or a change
let own = null; // {name, config}: a config.json of one's own, in place of a model's name

const exact = (name) => $(`${name}-number`);
const size = (name) => exact(name).value === "" ? "" : Number(exact(name).value);
const pricePerHour = () => Number(form.price.value) > 0 ? Number(form.price.value) : 0;

function slid(name) { // a slider was moved: the exact value follows
  const value = POWERS[name] ** Number(form[name].value);
  delete extra[name];
  exact(name).value = name === "ctx" ? Math.round(value / 32) * 32 : Math.round(value);
}

function put(name, value) { // an exact value was given: the slider follows as well as it can
  exact(name).value = value;
  delete extra[name];
  if (exact(name).value === "" && value !== "") extra[name] = value; // no number: the answer says so
  if (value > 0) form[name].value = Math.log(value) / Math.log(POWERS[name]);
}

function options() { // what is asked, as a request has it
  const found = own ? { config: own.config } : extra.arch ? {} : { model: form.model.value.trim() };
  if (form.gpu.value) found.gpu = form.gpu.value;
  found.method = form.elements.method.value;
  for (const name of ["bs", "ctx", "grad_accum"]) found[name] = size(name);
  if (form.elements.method.value !== "full") found.rank = size("rank");
  for (const name of COUNTS) if (Number(form[name].value) > 1) found[name] = Number(form[name].value);
  for (const name of SELECTS) if (form[name].value) found[name] = form[name].value;
  return { ...found, ...extra };
}

function cleared() { // every field without a word, method and sizes as they are
  for (const name of [...SELECTS, ...COUNTS]) form[name].value = "";
  form.gpu.value = "";
  extra = {};
}

function adopt(wanted) { // options of a link or of a configuration that was kept
  cleared();
  own = wanted.config ? { name: wanted.named || "config.json", config: wanted.config } : null;
  for (const [name, value] of Object.entries(wanted)) if (!["config", "named", "vs", "price"].includes(name)) set(name, value);
}

function take(chosen) { // a row of the plan: the model and the GPU stay
  const gpu = form.gpu.value, arch = extra.arch;
  cleared();
  form.gpu.value = gpu;
  if (arch) extra.arch = arch;
  form.elements.method.value = "full";
  for (const [name, value] of Object.entries(chosen)) if ((value !== false || name === "clip") && !["model", "gpu", "config", "arch"].includes(name)) set(name, value);
}

function read(text) { // a value as it stands in a link or a command
  return text === "true" ? true : text === "false" ? false : /^[0-9]{1,9}$/.test(text) ? Number(text) : text;
}

function set(name, value) { // one option, into its field if it has one
  const several = name === "gpus" && /^([0-9]{1,7})x(.+)$/i.exec(String(value)); // 8xH100-SXM5-80GB
  if (several && lists.gpus.some((gpu) => gpu.name === several[2])) { form.gpu.value = several[2]; value = several[1]; }
  const has = Object.hasOwn(POWERS, name) || SELECTS.includes(name) || COUNTS.includes(name) || ["model", "gpu", "method"].includes(name);
  delete extra[name];
  if (Object.hasOwn(POWERS, name)) put(name, value);
  else if (!has) extra[name] = value;
  else {
    const field = form.elements[name];
    if (name === "model") own = null;
    field.value = value;
    if (field.value !== String(value)) { field.value = ""; extra[name] = value; } // a value its list does not have
  }
}

function setFlags(flags) { // "--bs 2 --targets 'q_proj, v_proj'" into the fields
  for (const [, no, flag, value] of flags.matchAll(/(?<!\S)--(no-)?([a-z0-9-]+)(?:[\s=]+('[^']*'|"[^"]*"|[^-\s]\S*))?/g)) {
    const word = flag.replaceAll("-", "_"), name = Object.hasOwn(lists.aliases, word) ? lists.aliases[word] : word, short = Object.hasOwn(lists.shorthands, name) ? lists.shorthands[name] : null;
    for (const other of lists.rivals?.[short ? short[0] : name] ?? []) delete extra[other];
    if (short) set(...short);
    else if (name === "train_mode") delete extra.eval;
    else set(name, value === undefined ? !no : read(value.replace(/^(['"])(.*)\1$/, "$2")));
  }
}

// ---------------------------------------------------------------- links

function written(wanted) { // options as the part of a link
  const link = new URLSearchParams();
  for (const [name, value] of Object.entries(wanted)) link.set(name, name === "config" ? JSON.stringify(value) : value);
  return link;
}

function fromLink(text, isKept = false) { // what was kept keeps nothing: a link may nest them without end
  const found = {};
  for (const [name, value] of new URLSearchParams(text)) {
    if (name === "vs") isKept || (found.vs ||= []).push(fromLink(value, true));
    else if (name === "config") { try { found.config = JSON.parse(value); } catch { found.model = value; } } // said to be no model
    else found[name] = name === "price" || name === "named" ? value : read(value);
  }
  return found;
}

function remember(wanted, others) { // everything that the page shows, in its address
  const link = written(wanted);
  if (own) link.set("named", own.name);
  if (pricePerHour()) link.set("price", form.price.value);
  for (const other of others) link.append("vs", written(other));
  history.replaceState(null, "", "#" + link);
}

// ---------------------------------------------------------------- a model of one's own

async function opened(file) { // a config.json; raises an Error that says what is wrong
  if (file.size > MOST_CONFIG_BYTES) throw new Error(`${file.name} has ${whole(file.size)} bytes; a config.json has at most ${whole(MOST_CONFIG_BYTES)} here`);
  let config;
  try { config = JSON.parse(await file.text()); }
  catch (error) { throw new Error(`${file.name} is not JSON (${error.message}); give a model's config.json`); }
  if (!config || typeof config !== "object" || Array.isArray(config)) throw new Error(`${file.name} holds no object; give a model's config.json`);
  own = { name: file.name, config };
  delete extra.arch;
}

function showFields() { // what the form says besides its fields
  for (const name of Object.keys(POWERS)) form[name].setAttribute("aria-valuetext", size(name).toLocaleString("en"));
  form.rank.disabled = exact("rank").disabled = form.elements.method.value === "full";
  $("own").hidden = !own;
  $("own-name").textContent = own ? own.name : "";
  form.model.disabled = Boolean(own);
  $("extra").hidden = !Object.keys(extra).length;
  $("extra-text").textContent = Object.entries(extra).map(([name, value]) => `${name}: ${value === true ? "on" : value === false ? "off" : value}`).join(", ");
}

function fillSuggestions() { // what typing is offered, once the first answer is there
  fill($("models"), ...lists.models.map((m) => make("option", `${(m.parameters / 1e9).toFixed(2)}B`, { value: m.name })));
  fill($("further-names"), ...lists.options.map((v) => make("option", undefined, { value: `--${v.replaceAll("_", "-")} ` })));
}

function fillLists() { // choices from the catalogue
  form.gpu.append(...lists.gpus.map((g) => make("option", `${g.name} (${gib(g.memory_bytes)} GiB)`, { value: g.name })));
  for (const select of form.querySelectorAll("[data-list]")) select.append(...lists.choices[select.name].map((v) => make("option", v, { value: v })));
  $("kind").append(...lists.exports.map((v) => make("option", v === "hf" ? "TRL, HF Trainer" : v, { value: v })));
}
