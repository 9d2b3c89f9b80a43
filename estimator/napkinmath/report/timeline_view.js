"use strict";
// The interactive timeline: of `--timeline step.html` and of the page. Draws the compact form that timeline_html.py
// writes: tensors, distinct segments of events, and their order.
const TIMELINE_MARKUP = `
<section aria-label="plot">
<div class="tools">
<button type="button" data-part="peak">to the peak</button><button type="button" data-part="in">zoom in</button><button type="button" data-part="out">zoom out</button>
<button type="button" data-part="all">whole step</button><button type="button" data-part="axis">show events in order</button>
</div>
<div class="plot"><canvas data-part="plot" tabindex="0" role="img" aria-label="Memory over one step"></canvas><div data-part="tip" class="tip" aria-hidden="true"></div></div>
<p class="keys">Wheel or <kbd>+</kbd> <kbd>-</kbd> zooms, dragging moves, <kbd>0</kbd> shows all. <kbd>&larr;</kbd> <kbd>&rarr;</kbd> move the cursor (<kbd>Shift</kbd>: further),
<kbd>&uarr;</kbd> <kbd>&darr;</kbd> choose a band, <kbd>p</kbd> goes to the peak, <kbd>Home</kbd> and <kbd>End</kbd> to the ends.</p>
</section>
<section class="cursor" aria-label="at the cursor">
<ul class="legend" data-part="legend"></ul>
<div class="total"><span>all shown</span><span class="number" data-part="sum"></span></div>
<h2>moment</h2>
<div aria-live="polite"><div data-part="moment"></div><div data-part="operation" class="faint"></div><div data-part="when" class="faint"></div></div>
<h2 data-part="heading">tensors at the cursor</h2>
<table><tbody data-part="tensors"></tbody></table>
<p class="faint" data-part="more"></p>
</section>`;

// Fills `host` with the view of `data`. `choices` (hidden bands by name, the axis, how many tensors are listed) outlives a view; `signal` ends it.
function timelineView(host, data, choices, signal) {
  host.innerHTML = TIMELINE_MARKUP;
  host.classList.add("timeline");
  const element = (part) => host.querySelector(`[data-part="${part}"]`);
  const canvas = element("plot"), tip = element("tip");
  const pen = canvas.getContext("2d");
  const roles = data.roles, tensors = data.tensors, numRoles = roles.length;
  const MARGIN = { left: 52, right: 12, top: 26, bottom: 44 };

  // ------------------------------------------------------------ expand: one entry for every event
  let count = 0;
  for (const [segment, repeat] of data.order) count += (data.segments[segment].events.length / 2) * repeat;
  const seconds = new Float64Array(count + 1), total = new Float64Array(count + 1), visible = new Float64Array(count + 1);
  const segmentOf = new Uint16Array(count + 1), repetitionOf = new Uint32Array(count + 1), eventOf = new Uint32Array(count + 1);
  const levels = roles.map(() => new Float64Array(count + 1));
  const spans = [];
  const ALLOC = 0, FREE = 1, PASS = 2, RUN = 3;

  function expand() {
    const level = new Float64Array(numRoles);
    for (const [tensor, copies] of data.alive) level[tensors[tensor][1]] += tensors[tensor][3] * copies;
    let at = 0, time = 0, sum = level.reduce((a, b) => a + b, 0);
    const put = () => {
      for (let r = 0; r < numRoles; r++) levels[r][at] = level[r];
      total[at] = sum;
      seconds[at] = time;
    };
    put();
    for (const [number, repeat] of data.order) {
      const segment = data.segments[number], events = segment.events;
      const even = segment.kernels.length === 0 && events.length ? segment.seconds / (events.length / 2) : 0;
      if (!spans.length || spans[spans.length - 1].phase !== segment.phase) spans.push({ phase: segment.phase, from: at, to: at });
      for (let repetition = 0; repetition < repeat; repetition++) {
        for (let e = 0; e < events.length; e += 2) {
          const action = events[e], index = events[e + 1];
          at++;
          const change = (tensor, sign) => {
            level[tensors[tensor][1]] += sign * tensors[tensor][3];
            sum += sign * tensors[tensor][3];
          };
          if (action === ALLOC) change(index, 1);
          else if (action === FREE) change(index, -1);
          else if (action === PASS) {
            change(segment.pairs[index][0], -1);
            change(segment.pairs[index][1], 1);
          } else time += segment.kernels[index][2];
          time += even;
          segmentOf[at] = number; repetitionOf[at] = repetition; eventOf[at] = e / 2;
          put();
        }
      }
      spans[spans.length - 1].to = at;
    }
  }
  expand();
  let peakAt = 0;
  for (let i = 0; i <= count; i++) if (total[i] > total[peakAt]) peakAt = i;
  const timed = seconds[count] > 0;

  // ------------------------------------------------------------ state
  const shown = roles.map((role) => !choices.hidden.has(role.name));
  let byTime = timed && !choices.inOrder, from = 0, to = 1, cursor = peakAt, band = -1;
  const position = (i) => (byTime ? seconds[i] : i);
  const extent = () => position(count) || 1;
  function indexAt(value) { // the first event beyond a place on the axis
    let low = 0, high = count;
    while (low < high) { const middle = (low + high) >> 1; if (position(middle) > value) high = middle; else low = middle + 1; }
    return low;
  }
  function sumVisible() {
    visible.fill(0);
    for (let r = 0; r < numRoles; r++) if (shown[r]) for (let i = 0; i <= count; i++) visible[i] += levels[r][i];
  }
  sumVisible();

  function bytes(value) {
    for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      const v = value / size;
      if (Math.abs(v) >= 0.9995) return v.toFixed(Math.abs(v) >= 100 ? 0 : Math.abs(v) >= 10 ? 1 : 2) + " " + unit;
    }
    return value.toFixed(0) + " B";
  }
  function clock(value) {
    for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) if (value >= size) return (value / size).toPrecision(3) + " " + unit;
    return (value / 1e-6).toFixed(2) + " us";
  }
  function roundSteps(low, high, most) {
    const raw = (high - low) / most;
    if (!(raw > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high * (1 + 1e-9); v += step) found.push(v);
    return found;
  }
  const label = (v) => Number(v.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 9 });

  // ------------------------------------------------------------ drawing
  let columns = [], stale = true;
  function layout() {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    const width = Math.max(200, Math.floor(box.width)), height = Math.max(160, Math.floor(box.height));
    if (canvas.width !== Math.floor(width * ratio) || canvas.height !== Math.floor(height * ratio)) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { width, height, left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  }
  function ceiling() {
    let top = 0;
    for (let i = 0; i <= count; i++) if (visible[i] > top) top = visible[i];
    for (const line of data.lines) if (line.bytes <= 3 * top && shown.every((s) => s)) top = Math.max(top, line.bytes);
    return (top || 1) * 1.08;
  }
  function fillColumns(f) { // the highest moment of every pixel column
    const number = f.right - f.left, low = from * extent(), width = ((to - from) * extent()) / number;
    columns = new Array(number);
    stale = false;
    let i = Math.max(indexAt(low) - 1, 0);
    for (let c = 0; c < number; c++) {
      const end = low + (c + 1) * width;
      let best = i;
      while (i < count && position(i + 1) <= end) { i++; if (visible[i] > visible[best]) best = i; }
      columns[c] = best;
    }
  }
  function draw() {
    const f = layout(), style = getComputedStyle(document.documentElement), ink = (name) => style.getPropertyValue(name).trim();
    const top = ceiling(), y = (v) => f.bottom - (v / top) * (f.bottom - f.top);
    const x = (v) => f.left + ((v / extent() - from) / (to - from)) * (f.right - f.left);
    fillColumns(f);
    pen.clearRect(0, 0, f.width, f.height);
    pen.font = "12px system-ui, sans-serif";
    const unit = total[peakAt] >= 2 ** 30 ? [2 ** 30, "GiB"] : total[peakAt] >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
    pen.textBaseline = "middle"; pen.textAlign = "right"; pen.lineWidth = 1;
    for (const tick of roundSteps(0, top / unit[0], 7)) {
      line(f.left, y(tick * unit[0]), f.right, y(tick * unit[0]), ink("--grid"));
      pen.fillStyle = ink("--faint"); pen.fillText(label(tick), f.left - 7, y(tick * unit[0]));
    }
    pen.fillText(unit[1], f.left - 7, f.top - 14);
    const lower = new Float64Array(columns.length);
    for (let r = 0; r < numRoles; r++) {
      if (!shown[r]) continue;
      pen.fillStyle = roles[r].color;
      pen.globalAlpha = band >= 0 && band !== r ? 0.45 : 1;
      pen.beginPath();
      for (let c = 0; c < columns.length; c++) {
        const height = levels[r][columns[c]];
        if (height > 0) pen.rect(f.left + c, y(lower[c] + height), 1.02, y(lower[c]) - y(lower[c] + height));
        lower[c] += height;
      }
      pen.fill();
    }
    pen.globalAlpha = 1;
    drawPhases(f, x, ink); drawAxis(f, x, ink); drawMarks(f, x, y, drawLines(f, y, top, ink), ink);
  }
  function line(x0, y0, x1, y1, color, dash = []) {
    pen.setLineDash(dash);
    pen.strokeStyle = color;
    pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke();
    pen.setLineDash([]);
  }
  function haloed(text, x, y, ink) { // letters that stay readable on a band
    pen.strokeStyle = ink("--paper"); pen.lineWidth = 3; pen.strokeText(text, x, y); pen.lineWidth = 1;
    pen.fillStyle = ink("--ink"); pen.fillText(text, x, y);
  }
  function drawPhases(f, x, ink) {
    pen.textAlign = "left"; pen.textBaseline = "alphabetic";
    for (const span of spans) {
      const x0 = Math.max(x(position(span.from)), f.left), x1 = Math.min(x(position(span.to)), f.right);
      if (x1 < f.left || x0 > f.right) continue;
      if (span.from > 0 && x0 > f.left) line(x0, f.top - 10, x0, f.bottom, ink("--faint"), [2, 3]);
      if (pen.measureText(span.phase).width + 8 >= x1 - x0) continue;
      pen.fillStyle = ink("--faint");
      pen.fillText(span.phase, x0 + 4, f.top - 8);
    }
  }
  function drawAxis(f, x, ink) {
    const all = extent();
    const [scale, unit] = !byTime || all >= 1 ? [1, "s"] : all >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
    pen.fillStyle = ink("--faint"); pen.textAlign = "center"; pen.textBaseline = "top";
    line(f.left, f.bottom, f.right, f.bottom, ink("--faint"));
    for (const tick of roundSteps((from * all) / scale, (to * all) / scale, 8)) {
      const at = x(tick * scale);
      if (at < f.left - 1 || at > f.right + 1) continue;
      line(at, f.bottom, at, f.bottom + 5, ink("--faint"));
      pen.fillText(label(tick), at, f.bottom + 8);
    }
    const longer = data.step_seconds > 1.05 * seconds[count]; // the GPU waits for the host
    const what = longer ? `the GPU's work, ${unit}; the step with its waits: ${clock(data.step_seconds)}` : `time within the step, ${unit}`;
    pen.fillText(byTime ? what : "events in order", (f.left + f.right) / 2, f.bottom + 26);
  }
  function drawLines(f, y, top, ink) { // returns where their texts begin and stand
    const texts = [];
    pen.textAlign = "right"; pen.textBaseline = "alphabetic";
    for (const mark of data.lines) {
      if (mark.bytes > top) continue;
      line(f.left, y(mark.bytes), f.right, y(mark.bytes), ink("--ink"), [7, 4]);
      const text = `${mark.label}: ${bytes(mark.bytes)}`, fits = pen.measureText(text).width < f.right - f.left - 12;
      const short = fits ? text : `${mark.label.split(",")[0]}: ${bytes(mark.bytes)}`;
      haloed(short, f.right - 6, y(mark.bytes) - 5, ink);
      texts.push({ left: f.right - 6 - pen.measureText(short).width, y: y(mark.bytes) - 5 });
    }
    return texts;
  }
  function drawMarks(f, x, y, texts, ink) {
    const at = (i) => Math.min(Math.max(x(position(i)), f.left), f.right);
    const inside = (i) => position(i) / extent() >= from - 1e-12 && position(i) / extent() <= to + 1e-12;
    if (inside(cursor)) line(at(cursor), f.top, at(cursor), f.bottom, ink("--ink"));
    if (inside(peakAt)) {
      pen.fillStyle = ink("--ink"); pen.beginPath(); pen.arc(at(peakAt), y(visible[peakAt]), 4, 0, 7); pen.fill();
      const all = shown.every((s) => s);
      const text = "peak " + bytes(total[peakAt]) + (all ? "" : `, ${bytes(visible[peakAt])} shown`);
      pen.font = "600 12px system-ui, sans-serif"; pen.textBaseline = "alphabetic";
      const height = y(visible[peakAt]), crowded = data.lines.some((mark) => height - y(mark.bytes) >= 0 && height - y(mark.bytes) < 20);
      const base = height + (crowded ? 15 : -5);
      // on the side that has room, off the cursor's line and other texts; on the right of two alike
      const peak = at(peakAt), width = pen.measureText(text).width + 12, crossing = inside(cursor) && at(cursor) - peak;
      const roomy = { right: peak + width <= f.right, left: peak - width >= f.left };
      const meets = (end) => texts.some((text) => Math.abs(text.y - base) < 14 && text.left < end);
      const free = { right: !(crossing > 3 && crossing < width) && !meets(peak + width), left: !(crossing < -3 && crossing > -width) && !meets(peak) };
      const late = roomy.left && (!roomy.right || (!free.right && free.left));
      pen.textAlign = late ? "right" : "left";
      haloed(text, peak + (late ? -9 : 9), meets(late ? peak : peak + width) ? base - 10 : base, ink);
    }
  }

  // ------------------------------------------------------------ what is alive at the cursor
  function aliveAt(i) {
    const copies = new Map(data.alive);
    const add = (t, n) => { const v = (copies.get(t) || 0) + n; if (v) copies.set(t, v); else copies.delete(t); };
    let at = 0;
    for (const [number, repeat] of data.order) {
      const segment = data.segments[number], events = segment.events;
      for (let repetition = 0; repetition < repeat; repetition++) {
        for (let e = 0; e < events.length; e += 2) {
          if (at === i) return copies;
          at++;
          const index = events[e + 1];
          if (events[e] === ALLOC) add(index, 1);
          else if (events[e] === FREE) add(index, -1);
          else if (events[e] === PASS) { add(segment.pairs[index][0], -1); add(segment.pairs[index][1], 1); }
        }
      }
    }
    return copies;
  }
  function rowsAt(i, role) {
    const rows = [];
    for (const [t, n] of aliveAt(i)) {
      const tensor = tensors[t];
      if (shown[tensor[1]] && (role < 0 || tensor[1] === role)) rows.push({ tensor, copies: n, size: tensor[3] * n });
    }
    return rows.sort((a, b) => b.size - a.size);
  }
  function operationAt(i) { // the next kernel of the segment, else the last one before
    if (i === 0 || !data.order.length) return "";
    const segment = data.segments[segmentOf[i]], events = segment.events;
    for (let e = eventOf[i] * 2; e < events.length; e += 2) if (events[e] === RUN) return describe(segment.kernels[events[e + 1]]);
    for (let e = eventOf[i] * 2; e >= 0; e -= 2) if (events[e] === RUN) return describe(segment.kernels[events[e + 1]]);
    return "";
  }
  const describe = (k) => `${k[0]}${k[1] ? " in " + k[1] : ""}${k[2] ? ", " + clock(k[2]) : ""}${k[3] ? ", " + k[3] : ""}`;
  function momentText(i) {
    const segment = data.order.length ? data.segments[segmentOf[i] || data.order[0][0]] : { phase: "", name: "" };
    const copy = segment.copies > 1 ? `, ${repetitionOf[i] + 1} of ${segment.copies}` : "";
    return segment.name.includes(segment.phase) ? segment.name + copy : `${segment.phase}: ${segment.name}${copy}`;
  }
  function cell(row, text, kind) { const td = row.insertCell(); td.textContent = text; if (kind) td.className = kind; return td; }
  function report() {
    const i = cursor;
    element("moment").textContent = momentText(i);
    element("operation").textContent = operationAt(i);
    element("when").textContent = (timed ? clock(seconds[i]) + ", " : "") + `event ${i.toLocaleString("en-US")} of ${count.toLocaleString("en-US")}`;
    element("sum").textContent = bytes(visible[i]);
    roles.forEach((role, r) => { element("amount" + r).textContent = levels[r][i] ? bytes(levels[r][i]) : "0"; });
    const body = element("tensors"), rows = rowsAt(i, band);
    body.replaceChildren();
    for (const { tensor, copies, size } of rows.slice(0, choices.rows)) {
      const row = body.insertRow();
      cell(row, bytes(size), "number");
      const what = cell(row, `${copies > 1 ? copies + " x " : ""}${tensor[0]}${tensor[4] ? " " + tensor[4] : ""}${tensor[5] ? " " + tensor[5] : ""}`);
      const where = document.createElement("div");
      where.className = "faint";
      where.textContent = tensor[2].replace(/\.(weight|bias)$/, "");
      what.append(where);
      what.style.borderLeft = `3px solid ${roles[tensor[1]].color}`; what.style.paddingLeft = "7px";
    }
    element("more").textContent = rows.length > choices.rows ? `and ${rows.length - choices.rows} more, ${bytes(rows.slice(choices.rows).reduce((a, b) => a + b.size, 0))}` : "";
    element("heading").textContent = band >= 0 ? `${roles[band].name} at the cursor` : "tensors at the cursor";
    canvas.setAttribute("aria-label", `Memory over one step. ${momentText(i)}, ${bytes(visible[i])}`);
  }
  let queued = false;
  function refresh() { // once a frame; a hidden page has no frames, so a timer stands by
    stale = true;
    if (queued) return;
    queued = true;
    const run = () => { if (queued && host.isConnected) { queued = false; draw(); report(); } };
    requestAnimationFrame(run);
    setTimeout(run, 150);
  }

  // ------------------------------------------------------------ pointer: the tensor under it
  function pick(event) {
    const box = canvas.getBoundingClientRect(), f = layout(), c = Math.floor(event.clientX - box.left) - f.left;
    if (stale) fillColumns(f);
    if (c < 0 || c >= columns.length) return null;
    const i = columns[c], height = ((f.bottom - (event.clientY - box.top)) / (f.bottom - f.top)) * ceiling();
    let low = 0;
    for (let r = 0; r < numRoles; r++) {
      if (!shown[r]) continue;
      const high = low + levels[r][i];
      if (height >= low && height < high) {
        let level = low;
        for (const row of rowsAt(i, r)) { level += row.size; if (height < level) return { i, role: r, row }; }
      }
      low = high;
    }
    return { i, role: -1, row: null };
  }
  function showTip(event, found) {
    if (!found || !found.row) { tip.style.visibility = "hidden"; return; }
    const { tensor, copies, size } = found.row;
    tip.replaceChildren();
    const add = (text, kind) => {
      const div = document.createElement("div");
      div.textContent = text;
      if (kind) div.className = kind;
      tip.append(div);
    };
    const name = document.createElement("b"); name.textContent = tensor[0]; tip.append(name);
    const each = copies > 1 ? `${copies} x ${bytes(tensor[3])} = ` : "";
    add(`${each}${bytes(size)}${tensor[4] ? ", " + tensor[4] : ""}${tensor[5] ? " " + tensor[5] : ""}`);
    if (tensor[2]) add(tensor[2]);
    add([roles[tensor[1]].name, tensor[6]].filter(Boolean).join(" · "), "faint");
    const op = operationAt(found.i);
    if (op) add("during " + op, "faint");
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    tip.style.visibility = "visible";
    tip.style.left = (px + 16 + tip.offsetWidth > box.width ? Math.max(px - 16 - tip.offsetWidth, 0) : px + 16) + "px";
    tip.style.top = Math.min(py + 14, box.height - tip.offsetHeight) + "px";
  }
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from, to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const f = layout(), shift = ((drag.x - event.clientX) / (f.right - f.left)) * (drag.to - drag.from);
      if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
      if (drag.moved) { view(drag.from + shift, drag.to + shift); tip.style.visibility = "hidden"; }
      return;
    }
    const found = pick(event);
    if (found) { cursor = found.i; band = found.role; refresh(); }
    showTip(event, found);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; band = -1; refresh(); });
  canvas.addEventListener("dblclick", () => view(0, 1));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), f = layout();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, from + ((event.clientX - box.left - f.left) / (f.right - f.left)) * (to - from));
  }, { passive: false });

  // ------------------------------------------------------------ view and keys
  function view(a, b) {
    const width = Math.min(Math.max(b - a, 1e-7), 1);
    from = Math.min(Math.max(a, 0), 1 - width); to = from + width;
    refresh();
  }
  function zoom(factor, around) { const middle = Math.min(Math.max(around, 0), 1); view(middle - (middle - from) * factor, middle + (to - middle) * factor); }
  const place = (i) => position(i) / extent();
  function follow() { const at = place(cursor); if (at < from || at > to) view(at - (to - from) / 2, at + (to - from) / 2); refresh(); }
  function move(step) { // by columns where a column holds several events, else by events
    const c = columns.indexOf(cursor), next = c >= 0 ? columns.slice(step > 0 ? c : 0, step > 0 ? undefined : c + 1) : [];
    const other = step > 0 ? next.find((i) => i > cursor) : next.reverse().find((i) => i < cursor);
    for (let n = 1; n < Math.abs(step); n++) cursor = Math.min(Math.max(cursor + Math.sign(step) * 5, 0), count);
    cursor = other !== undefined && Math.abs(step) === 1 ? other : Math.min(Math.max(cursor + Math.sign(step), 0), count);
    follow();
  }
  const bands = () => roles.map((_, r) => r).filter((r) => shown[r] && levels[r][cursor] > 0);
  function nextBand(step) {
    const found = bands(), at = found.indexOf(band);
    band = (at < 0 ? found[step > 0 ? 0 : found.length - 1] : found[at + step]) ?? -1;
    refresh();
  }
  const keys = {
    ArrowRight: (e) => move(e.shiftKey ? 20 : 1), ArrowLeft: (e) => move(e.shiftKey ? -20 : -1),
    ArrowUp: () => nextBand(1), ArrowDown: () => nextBand(-1),
    "+": () => zoom(0.6, place(cursor)), "=": () => zoom(0.6, place(cursor)), "-": () => zoom(1 / 0.6, place(cursor)), 0: () => view(0, 1),
    Home: () => { cursor = 0; follow(); }, End: () => { cursor = count; follow(); }, p: () => { cursor = peakAt; follow(); },
    Escape: () => { band = -1; tip.style.visibility = "hidden"; refresh(); },
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event);
  });
  element("in").onclick = () => zoom(0.6, place(cursor));
  element("out").onclick = () => zoom(1 / 0.6, place(cursor));
  element("all").onclick = () => view(0, 1);
  element("peak").onclick = () => { cursor = peakAt; follow(); };
  const axisText = () => (byTime ? "show events in order" : "show time");
  element("axis").hidden = !timed;
  element("axis").textContent = axisText();
  element("axis").onclick = (event) => {
    byTime = !byTime;
    choices.inOrder = !byTime;
    event.target.textContent = axisText();
    view(0, 1);
  };

  // ------------------------------------------------------------ legend, top of the stack first
  const legend = element("legend");
  for (let r = numRoles - 1; r >= 0; r--) {
    const [item, button, swatch, name, amount] = ["li", "button", "i", "span", "span"].map((kind) => document.createElement(kind));
    button.type = "button"; button.setAttribute("aria-pressed", String(shown[r])); button.title = "show or hide " + roles[r].name;
    swatch.style.background = roles[r].color; name.textContent = roles[r].name; amount.dataset.part = "amount" + r; amount.className = "number";
    button.append(swatch, name, amount);
    button.onclick = () => {
      shown[r] = !shown[r];
      if (shown[r]) choices.hidden.delete(roles[r].name); else choices.hidden.add(roles[r].name);
      button.setAttribute("aria-pressed", String(shown[r]));
      sumVisible();
      refresh();
    };
    item.append(button); legend.append(item);
  }
  window.addEventListener("resize", refresh, { signal });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh, { signal });
  draw(); report();
}
