"use strict";
// What should I run? The best of a search as cards, each to be taken over.
async function plan() {
  const wanted = { ...options(), goal: $("goal").value };
  if ($("plan-method").value) delete wanted.method, delete wanted.rank;
  $("search").disabled = true;
  $("plan-said").textContent = "searching\u2026";
  try { showPlan(await transport.post("/api/plan", wanted)); }
  catch (error) { fill($("plan")); $("plan-said").textContent = error.message; }
  finally { $("search").disabled = false; }
}

function showPlan(found) {
  $("plan-said").textContent = `${found.num_candidates ? `${whole(found.num_candidates)} candidates priced, ${found.num_verified} replayed in the allocator` : `${found.num_verified} meshes that fit`}${[found.best.length ? "" : ": nothing fits", ...(found.notes ?? [])].filter(Boolean).join("; ")}`;
  fill($("plan"), ...found.best.map(card));
}

function card(one, index) {
  const made = make("li", undefined, { class: "card" }), { bs, ctx } = one.options, limit = one.device_bytes + one.headroom_bytes;
  const meter = make("div", undefined, { class: "meter", "aria-hidden": "true" }), used = make("span");
  used.style.width = `${100 * one.device_bytes / limit}%`;
  meter.append(used);
  const speed = one.tokens_per_s ? `${whole(one.tokens_per_s)} tokens/s` : "speed not known";
  const price = pricePerHour() && one.tokens_per_s ? `, $${money(pricePerHour() * (Number(one.options.gpus) || 1) / 3600 / one.tokens_per_s * 1e6)} a million` : "";
  const changes = make("p", undefined, { class: "chips" });
  changes.append(...(one.changes.length ? one.changes : ["as it is"]).map((flag) => make("code", flag)));
  made.append(make("h3", `${index === 0 ? "Best: " : ""}batch ${bs}, context ${whole(ctx)}`), make("p", speed + price, { class: "strong" }), meter,
    make("p", `${gib(one.device_bytes)} of ${gib(limit)} GiB, ${gib(one.headroom_bytes)} to spare`, { class: "what" }), changes,
    button("Use", `Use batch ${bs}, ${one.changes.join(", ") || "as it is"}`, () => { take(one.options); settle(); }));
  return made;
}
