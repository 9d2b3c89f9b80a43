"use strict";
// Configurations side by side: at most two that were kept, and the one in the form.
const MOST_KEPT = 2;
let kept = []; // {options, report or null}, in the order they were kept

function keep(wanted, report) {
  if (kept.length === MOST_KEPT) kept.shift();
  kept.push({ options: wanted, report });
}

async function restoreKept(others) { // of a link: their answers are asked for again
  kept = others.slice(0, MOST_KEPT).map((wanted) => ({ options: wanted, report: null, wrong: "" }));
  for (const one of kept) {
    try { one.report = (await transport.post("/api/estimate", one.options)).report; }
    catch (error) { one.wrong = error.message; }
  }
}

const settings = (wanted) => { const { config, ...rest } = wanted; return config ? { model: config.model_type || "config.json", ...rest } : rest; };

function differences(all) { // options in which they differ: [name, value of each]
  const plain = all.map((one) => settings(one.options));
  const names = [...new Set(plain.flatMap(Object.keys))];
  return names.map((name) => [name.replaceAll("_", " "), ...plain.map((p) => name in p ? String(p[name]) : "")]).filter(([, ...values]) => new Set(values).size > 1);
}

const FIGURES = [ // [what, of a report]
  ["verdict", (r) => r.verdict],
  ["device, GiB", (r) => span(r.memory.device)],
  ["to spare, GiB", (r) => r.headroom ? gib(r.headroom.value) : ""],
  ["a step", (r) => r.time ? lasts(r.time.seconds) : ""],
  ["tokens/s", (r) => r.time ? whole(r.time.all_gpus.tokens_per_s) : ""],
  ["MFU", (r) => r.time ? percent(r.time.mfu) : ""],
  ["$ a million tokens", (r) => r.time && cost(r.time) ? money(cost(r.time)) : ""],
];

function byRole(all) { // bytes of each role: [role, bytes of each]
  const roles = Object.keys(lists.colors).filter((role) => all.some((one) => one.report && one.report.components.some((c) => c.role === role)));
  return roles.map((role) => [role, ...all.map((one) => one.report ? some(one.report.components.filter((c) => c.role === role).reduce((sum, c) => sum + c.nbytes, 0)) : "")]);
}

function showCompared(current) {
  $("compare-box").hidden = !kept.length;
  if (!kept.length) return;
  const all = [...kept, current], table = $("compare"), head = make("tr");
  head.append(make("td"), ...all.map((one, index) => {
    const th = make("th", one === current ? "now" : `kept ${index + 1}`, { scope: "col" });
    if (one !== current) th.append(make("br"), button("Use", `Use kept ${index + 1}`, () => { adopt(one.options); settle(); }), " ", button("Drop", `Drop kept ${index + 1}`, () => { kept = kept.filter((k) => k !== one); changed(); }));
    return th;
  }));
  fill(table.tHead, head);
  const line = ([name, ...values], kind) => { const tr = make("tr"); const th = make("th", name, { scope: "row" }); if (lists.colors[name]) th.prepend(swatch(lists.colors[name])); tr.append(th, ...values.map((v) => make("td", v, { class: kind }))); return tr; };
  const figures = FIGURES.map(([name, of]) => [name, ...all.map((one) => one.report ? of(one.report) : one.wrong || "\u2026")]).filter(([, ...values]) => values.some(Boolean));
  fill(table.tBodies[0], ...differences(all).map((r) => line(r, "number")), ...figures.map((r) => line(r, "number strong")), ...byRole(all).map((r) => line(r, "number")));
}
