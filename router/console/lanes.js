// Requests over the pools: a lane for the router and for each worker, time from left to right. A
// request is a bar in the lane where it is; a curve is its KV on the way to another worker.

import { Surface, colour, dot, faded, fit, line, say, write } from "./draw.js";
import { stepList, wayOf } from "./detail.js";

const [RIGHT, TOP, BOTTOM] = [14, 6, 22];
const MAX_ROWS = 14; // of one lane; what is more lies over the others
const CALM_MS = 8000; // a lane that needs less room keeps it for so long
const KEEP_S = 150;
const MANY = 12; // lanes: above that each is lower and has one line of text
const DOT_ROOM = 8; // pixels for each request in view, down to which first tokens are marked

export class Lanes {
  constructor(section, model, selection) {
    this.model = model;
    this.selection = selection;
    this.canvas = section.querySelector("canvas");
    this.tip = section.querySelector(".tip");
    this.empty = section.querySelector(".empty");
    const narrow = matchMedia("(max-width: 720px)").matches;
    const chosen = section.querySelector(`#span input[value="${narrow ? 10 : 30}"]`);
    chosen.checked = true;
    this.span = Number(chosen.value);
    this.now = 0;
    this.placed = new Map(); // lane → request → {start, end, row}
    this.heights = new Map(); // lane → {rows, since}
    this.hits = [];
    this.cost = 0; // milliseconds that the last picture took
    this.surface = new Surface(this.canvas, (...all) => this.paint(...all));
    this.listen(section);
  }

  /** Draw what was until ``now``, by the server's clock. */
  draw(now) {
    const began = performance.now();
    this.now = now;
    this.requests = this.model.within(now - this.span, now);
    this.remark();
    this.arrange();
    this.surface.draw();
    this.cost = performance.now() - began;
  }

  /** What the picture lacks, in words. */
  remark() {
    const { live, requests, router } = this.model;
    const running = router ? router.requests.in_flight : 0;
    const cut = running > live.size && live.size >= router.live_most;
    this.empty.hidden = requests.size + live.size > 0 && !cut;
    if (this.empty.hidden) return;
    say(this.empty, cut ? `${live.size} of the ${running} that run are drawn: those that came first, and the latest.`
      : "Nothing has been asked yet. Ask something in the chat.");
  }

  /** Whether time changes the picture. */
  get moves() {
    return Boolean(this.requests && (this.requests.length || this.model.live.size));
  }

  // --- where things are -----------------------------------------------------------------------

  arrange() {
    const lanes = [{ name: "", role: "router" }];
    for (const worker of this.model.workers()) {
      lanes.push({ name: worker.id, role: worker.role, state: worker.stalled ? "stalled" : worker.state });
    }
    const known = new Set(lanes.map((lane) => lane.name));
    for (const request of this.requests) {
      for (const [, , , name] of request.spans) {
        if (!known.has(name)) { // a worker that is gone
          known.add(name);
          lanes.push({ name, role: name.split("-")[0], state: "dead" });
        }
      }
    }
    const rows = this.rows();
    this.low = lanes.length > MANY;
    const time = performance.now();
    let y = TOP;
    this.lanes = new Map();
    for (const lane of lanes) {
      const needs = Math.max(1, rows.get(lane.name) || 0);
      const kept = this.heights.get(lane.name);
      if (!kept || needs >= kept.rows || time - kept.since > CALM_MS) {
        this.heights.set(lane.name, { rows: needs, since: time });
      }
      lane.rows = this.heights.get(lane.name).rows;
      lane.row = lane.rows <= 3 ? 11 : lane.rows <= 8 ? 8 : 6;
      lane.height = Math.max(lane.role === "router" ? 26 : this.low ? 20 : 38, lane.rows * lane.row + 8);
      lane.y = y;
      lane.pad = (lane.height - lane.rows * lane.row) / 2;
      y += lane.height + 3;
      this.lanes.set(lane.name, lane);
    }
    const height = `${Math.round(y + BOTTOM)}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
  }

  /** A row for each request in each of its lanes, which it keeps; how many rows a lane needs. */
  rows() {
    const needs = new Map();
    for (const request of this.requests) {
      for (const [lane, start, end] of this.stays(request)) {
        const row = this.place(lane, request.key, start, end);
        needs.set(lane, Math.max(needs.get(lane) || 0, row + 1));
      }
    }
    for (const all of this.placed.values()) {
      for (const [key, one] of all) {
        // What runs and is not known any more went with a router that was restarted.
        const known = one.end === Infinity ? this.model.live.has(key) : this.model.find(key);
        if (!known || one.end < this.now - KEEP_S) all.delete(key);
      }
    }
    return needs;
  }

  stays(request) {
    const found = new Map();
    for (const [, start, end, lane] of request.spans) {
      const until = end === null ? Infinity : request.at + end;
      const stay = found.get(lane);
      if (stay) stay[2] = Math.max(stay[2], until);
      else found.set(lane, [lane, request.at + start, until]);
    }
    if (!found.size) found.set("", ["", request.at, request.at + (request.end || 0)]);
    return found.values();
  }

  place(lane, key, start, end) {
    const all = this.placed.get(lane) || new Map();
    this.placed.set(lane, all);
    const known = all.get(key);
    if (known) {
      known.end = end;
      return known.row;
    }
    const room = 0.004 * this.span; // so that neighbours do not grow together
    const taken = new Set();
    for (const one of all.values()) {
      if (one.start < end + room && one.end + room > start) taken.add(one.row);
    }
    let row = 0;
    while (taken.has(row)) row += 1;
    if (row >= MAX_ROWS) row = all.size % MAX_ROWS;
    all.set(key, { start, end, row });
    return row;
  }

  // --- the picture ----------------------------------------------------------------------------

  paint(context, width, height) {
    if (!this.lanes) return;
    this.left = width < 500 ? 68 : 88; // room for names
    const right = width - RIGHT;
    const from = this.now - this.span;
    const x = (t) => this.left + ((t - from) / this.span) * (right - this.left);
    this.hits = [];
    this.backdrop(context, width, height, right);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, right - this.left + 2, height);
    context.clip();
    const chosen = this.selection.key || this.selection.hover;
    const others = this.requests.filter((one) => one.key !== chosen);
    const dots = this.requests.length * DOT_ROOM <= right - this.left;
    const dim = chosen && others.length < this.requests.length ? 0.28 : 1;
    context.globalAlpha = dim;
    for (const one of others) this.links(context, one, x, 1);
    for (const one of others) this.bars(context, one, x, dots);
    context.globalAlpha = 1;
    for (const one of this.requests) {
      if (one.key !== chosen) continue;
      this.links(context, one, x, 2);
      this.bars(context, one, x, true, true);
    }
    context.restore();
    line(context, [[right, TOP], [right, height - BOTTOM + 4]], colour["ink-3"], 1);
  }

  backdrop(context, width, height, right) {
    let i = 0;
    for (const lane of this.lanes.values()) {
      context.fillStyle = i % 2 ? faded("raised", 0.45) : faded("raised", 0.8);
      context.fillRect(this.left, lane.y, right - this.left, lane.height);
      const gone = lane.state === "dead" || lane.state === "stalled";
      context.fillStyle = lane.role === "router" ? colour.queue : colour[lane.role] || colour.queue;
      context.globalAlpha = gone ? 0.4 : 1;
      context.fillRect(0, lane.y, 3, lane.height);
      context.globalAlpha = 1;
      const middle = lane.y + lane.height / 2;
      if (lane.role === "router") {
        write(context, "router", 9, middle, colour["ink-2"]);
      } else {
        const hue = colour[`${lane.role}-ink`] || colour["ink-2"];
        const rest = lane.name.startsWith(`${lane.role}-`) ? lane.name.slice(lane.role.length + 1) : lane.name;
        const room = this.left - 13;
        const [away, calm] = [this.low ? 0 : 7, this.low ? hue : colour["ink-3"]];
        if (!this.low) write(context, fit(context, lane.role, room), 9, middle - away, gone ? colour["ink-3"] : hue);
        const state = fit(context, lane.state === "ready" ? rest : lane.state, room);
        write(context, state, 9, middle + away, gone ? colour["bad-ink"] : calm);
      }
      i += 1;
    }
    const step = this.span === 10 ? 2 : this.span / 6;
    for (let ago = step; ago < this.span; ago += step) {
      const x = right - (ago / this.span) * (right - this.left);
      line(context, [[x, TOP], [x, height - BOTTOM]], colour.grid, 1);
      write(context, `−${+ago.toFixed(1)} s`, x, height - 9, colour["ink-3"], "center");
    }
    write(context, "now", right, height - 9, colour["ink-3"], "right");
    this.unknown(context, height, right);
  }

  /** Where the picture begins to be complete: at high rates the oldest requests are dropped. */
  unknown(context, height, right) {
    const since = this.model.complete - (this.now - this.span);
    if (since <= 0) return;
    const x = Math.min(right, this.left + (since / this.span) * (right - this.left));
    line(context, [[x, TOP], [x, height - BOTTOM]], colour["ink-3"], 1, [2, 4]);
    const text = "not all are kept";
    if (context.measureText(text).width + 12 > x - this.left) return;
    write(context, text, x - 6, TOP + 10, colour["ink-3"], "right");
  }

  /** Where a request's row in a lane is. */
  band(name, key) {
    const lane = this.lanes.get(name);
    const placed = this.placed.get(name)?.get(key);
    if (!lane || !placed) return null;
    const row = Math.min(placed.row, lane.rows - 1);
    return { y: lane.y + lane.pad + row * lane.row, height: lane.row - 2 };
  }

  bars(context, request, x, dots, chosen = false) {
    for (const [stage, start, end, name] of request.spans) {
      const band = this.band(name, request.key);
      if (!band) continue;
      const x0 = x(request.at + start);
      const x1 = end === null ? x(this.now) : x(Math.min(request.at + end, this.now));
      if (x1 < this.left || x0 > x(this.now)) continue;
      // Whether a prompt waits at its worker or is computed is known at its end.
      const open = end === null && stage === "prefill";
      bar(context, open ? "open" : stage, x0, Math.max(1.5, x1 - x0), band, chosen);
      this.hits.push([x0, Math.max(x1, x0 + 3), band.y, band.y + band.height, request.key]);
    }
    if (!request.spans.length) { // refused at once
      const band = this.band("", request.key);
      const at = x(request.at);
      context.fillStyle = colour.bad;
      if (band) context.fillRect(at, band.y, 2, band.height);
      if (band) this.hits.push([at - 3, at + 4, band.y, band.y + band.height, request.key]);
    }
    this.marks(context, request, x, dots);
  }

  marks(context, request, x, dots) {
    const { spans } = request;
    const now = this.now - request.at;
    if (dots && request.ttft !== null && request.ttft <= now) {
      const made = spans.findLast(([stage, , end]) => stage === "prefill" && end !== null && end <= request.ttft + 1e-3);
      const band = made && this.band(made[3], request.key);
      if (band) dot(context, x(request.at + made[2]), band.y + band.height / 2, 2.6, colour.panel, colour.ink);
    }
    for (const [at] of request.retries) {
      const lost = spans.find(([, , end]) => end !== null && Math.abs(end - at) < 2e-3) || spans.at(-1);
      const band = lost && this.band(lost[3], request.key);
      if (band && at <= now) cross(context, x(request.at + at), band.y + band.height / 2, colour.bad);
    }
    if (request.end !== null && request.end <= now && request.code >= 400 && spans.length) {
      const band = this.band(spans.at(-1)[3], request.key);
      const hue = request.code === 499 ? colour["ink-2"] : colour.bad;
      if (band) cross(context, x(request.at + request.end), band.y + band.height / 2, hue);
    }
  }

  /** KV on its way: from where the prompt was computed to where its answer goes on. */
  links(context, request, x, width) {
    let from = null;
    for (const [stage, start, end, name] of request.spans) {
      if (stage === "prefill" && end !== null) from = [end, name];
      if (stage !== "decode" || !from || from[1] === name) continue;
      const [a, b] = [this.band(from[1], request.key), this.band(name, request.key)];
      if (!a || !b || request.at + start > this.now) continue;
      const [x0, y0] = [x(request.at + from[0]), a.y + a.height / 2];
      const [x1, y1] = [x(request.at + start), b.y + b.height / 2];
      const bend = Math.max(9, (x1 - x0) / 2);
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      context.strokeStyle = width > 1 ? colour.kv : faded("kv", this.requests.length > 60 ? 0.45 : 0.7);
      context.lineWidth = width;
      context.stroke();
      from = null;
    }
  }

  // --- pointer and keyboard -------------------------------------------------------------------

  listen(section) {
    const { canvas, selection } = this;
    canvas.addEventListener("pointermove", (event) => {
      const key = this.under(event);
      selection.point(key);
      this.explain(key, event);
    });
    canvas.addEventListener("pointerleave", () => {
      selection.point(null);
      this.tip.hidden = true;
    });
    canvas.addEventListener("click", (event) => selection.choose(this.under(event)));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      selection.step(step);
    });
    for (const input of section.querySelectorAll("#span input")) {
      input.addEventListener("change", () => {
        this.span = Number(input.value);
        this.draw(this.now);
      });
    }
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let nearest = event.pointerType === "touch" ? 14 : 5;
    for (const [x0, x1, y0, y1, key] of this.hits) {
      const away = Math.max(x0 - px, px - x1, 0) + Math.max(y0 - py, py - y1, 0);
      if (away < nearest) [nearest, best] = [away, key];
    }
    return best;
  }

  explain(key, event) {
    const request = key && this.model.find(key);
    this.tip.hidden = !request;
    if (!request) return;
    const way = wayOf(request).join(" → ");
    const head = document.createElement("b");
    head.textContent = way || "not at a worker";
    this.tip.replaceChildren(head, stepList(request, this.now, false));
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - wide - 4))}px`;
    this.tip.style.top = `${y + 16}px`;
  }
}

function bar(context, stage, x, width, { y, height }, chosen) {
  const thin = { queue: 0.45, tokenize: 0.45, transfer: 0.5 }[stage] || 1;
  const tall = Math.max(2, height * thin);
  const top = y + (height - tall) / 2;
  if (stage === "lost") {
    context.fillStyle = faded("bad", 0.22);
    context.fillRect(x, top, width, tall);
    context.strokeStyle = colour.bad;
    context.lineWidth = 1;
    context.setLineDash([2, 2]);
    context.strokeRect(x + 0.5, top + 0.5, Math.max(1, width - 1), tall - 1);
    context.setLineDash([]);
    return;
  }
  const hue = { tokenize: "queue", transfer: "kv" }[stage] || stage;
  context.fillStyle = stage === "open" ? faded("prefill", 0.5) : colour[hue] || colour.queue;
  context.beginPath();
  context.roundRect(x, top, width, tall, Math.min(2, width / 2));
  context.fill();
  if (chosen && thin === 1) {
    context.strokeStyle = colour.ink;
    context.lineWidth = 1.2;
    context.stroke();
  }
}

function cross(context, x, y, style) {
  line(context, [[x - 3.5, y - 3.5], [x + 3.5, y + 3.5]], style, 2);
  line(context, [[x - 3.5, y + 3.5], [x + 3.5, y - 3.5]], style, 2);
}
