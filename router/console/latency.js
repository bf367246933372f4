// TTFT and TPOT against their objectives over five minutes, and goodput below them.

import {
  Surface, amount, colour, dot, faded, line, logScale, logTicks, make, percent, say, seconds,
  shortSeconds, write,
} from "./draw.js";
import { HISTORY_S } from "./model.js";

const LEFT = 50;
const RIGHT = 8;
const BOTTOM = 16;
const STEP_S = 5;
const GAP_S = 3.5 * STEP_S; // a line does not go on over a longer silence

/** Figures beside a title: [[name, text, class], …]. */
function figures(section, rows) {
  const list = section.querySelector(".figures");
  while (list.children.length < rows.length) {
    list.append(make("div", {}, make("dt"), make("dd")));
  }
  rows.forEach(([name, text, kind], i) => {
    const row = list.children[i];
    say(row.firstChild, name);
    say(row.lastChild, text);
    if (row.className !== (kind || "")) row.className = kind || "";
  });
}

function timeAxis(context, width, height, right) {
  const x = (ago) => right - (ago / HISTORY_S) * (right - LEFT);
  for (const minutes of [1, 2, 3, 4]) {
    line(context, [[x(60 * minutes), 4], [x(60 * minutes), height - BOTTOM]], colour.grid, 1);
  }
  write(context, "5 min ago", LEFT, height - 6, colour["ink-3"]);
  write(context, "now", right, height - 6, colour["ink-3"], "right");
  return x;
}

/** One latency: percentiles of five seconds each, on a logarithmic axis with the objective. */
export class Latency {
  constructor(section, model, name, hue) {
    this.section = section;
    this.model = model;
    this.name = name; // ttft | tpot
    this.hue = hue;
    this.surface = new Surface(section.querySelector("canvas"), (...all) => this.paint(...all));
  }

  get slo() {
    return this.model.router ? this.model.router.slo[this.name] : null;
  }

  update() {
    const { router } = this.model;
    const now = router ? router.now[this.name] : null;
    const slo = this.slo;
    figures(this.section, ["p50", "p95", "p99"].map((p) => [
      p, now ? seconds(now[p]) : "–", now && slo && now[p] > slo ? `${p} bad` : p,
    ]));
    const label = now
      ? `Of ${lately(router.now)}: p50 ${seconds(now.p50)}, p95 ${seconds(now.p95)}, SLO ${seconds(slo)}`
      : "No request in the last minute";
    this.section.querySelector(".figures").title = now ? `of ${lately(router.now)}` : "";
    this.surface.canvas.setAttribute("aria-label", `${this.section.querySelector("h2").textContent}. ${label}`);
    this.surface.draw();
  }

  paint(context, width, height) {
    const { name, model, slo } = this;
    const points = [...model.history.values()].filter((p) => p[name]).sort((a, b) => a.t - b.t);
    const now = model.now();
    const right = width - RIGHT;
    const x = timeAxis(context, width, height, right);
    const values = points.flatMap((p) => [p[name].p50, p[name].p95]);
    if (slo) values.push(slo * 1.35, slo / 4);
    if (!values.length) return;
    const [low, high] = [Math.min(...values) * 0.7, Math.max(...values) * 1.25];
    const y = logScale(low, high, height - BOTTOM, 6);
    for (const value of logTicks(low, high)) {
      line(context, [[LEFT, y(value)], [right, y(value)]], colour.grid, 1);
      write(context, shortSeconds(value), LEFT - 6, y(value), colour["ink-3"], "right");
    }
    if (slo) this.objective(context, y(slo), right);
    const at = (p, which) => [x(now - p.t - STEP_S / 2), y(p[name][which])];
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, right - LEFT, height);
    context.clip();
    for (const piece of pieces(points)) {
      if (piece.length === 1) {
        dot(context, ...at(piece[0], "p95"), 2.2, colour[this.hue]);
        dot(context, ...at(piece[0], "p50"), 1.6, colour["ink-2"]);
        continue;
      }
      const upper = piece.map((p) => at(p, "p95"));
      const lower = piece.map((p) => at(p, "p50"));
      context.beginPath();
      [...upper, ...lower.toReversed()].forEach(([a, b], i) => (i ? context.lineTo(a, b) : context.moveTo(a, b)));
      context.fillStyle = faded(this.hue, 0.14);
      context.fill();
      line(context, lower, colour["ink-2"], 1.2);
      line(context, upper, colour[this.hue], 1.8);
    }
    for (const p of points) {
      if (slo && p[name].p95 > slo) dot(context, ...at(p, "p95"), 2.6, colour.bad);
    }
    context.restore();
  }

  objective(context, y, right) {
    context.fillStyle = faded("bad", 0.05);
    context.fillRect(LEFT, 4, right - LEFT, Math.max(0, y - 4));
    line(context, [[LEFT, y], [right, y]], colour.bad, 1.2, [5, 4]);
    write(context, `SLO ${shortSeconds(this.slo)}`, LEFT + 5, y - 8, colour["bad-ink"]);
  }
}

/** Requests per second that met all objectives, and those that did not. */
export class Goodput {
  constructor(section, model) {
    this.section = section;
    this.model = model;
    this.surface = new Surface(section.querySelector("canvas"), (...all) => this.paint(...all));
  }

  update() {
    const { model } = this;
    const { router } = model;
    if (!router) return;
    const { now, requests } = router;
    const share = now.judged ? now.good / now.judged : null;
    const rates = router.workers.map((worker) => model.rates(worker)).filter(Boolean);
    const tokens = rates.reduce((sum, rate) => sum + rate.generated, 0);
    figures(this.section, [
      ["SLO met", share === null ? "–" : percent(share), share === null ? "" : share >= 0.99 ? "good" : share < 0.95 ? "bad" : ""],
      ["tok/s", rates.length ? amount(tokens) : "–"],
      ["in flight", `${requests.in_flight}`],
      ["queued", `${requests.queued}`],
    ]);
    const label = share === null ? "No request in the last minute"
      : `${now.good} of ${now.judged} requests of ${lately(now)} were within the SLOs`;
    this.surface.canvas.setAttribute("aria-label", `Goodput. ${label}`);
    this.section.querySelector(".figures").title = share === null ? "" : label;
    this.surface.draw();
  }

  paint(context, width, height) {
    const { model } = this;
    const right = width - RIGHT;
    const x = timeAxis(context, width, height, right);
    const points = [...model.history.values()].filter((p) => p.judged);
    const most = Math.max(2, ...points.map((p) => p.judged)) / STEP_S;
    const high = niceAbove(most);
    const floor = height - BOTTOM;
    const y = (value) => floor - (value / high) * (floor - 8);
    for (const share of [0, 0.5, 1]) {
      line(context, [[LEFT, y(high * share)], [right, y(high * share)]], colour.grid, 1);
      write(context, share ? `${+(high * share).toPrecision(2)}/s` : "0", LEFT - 6, y(high * share), colour["ink-3"], "right");
    }
    const now = model.now();
    const wide = Math.max(2, ((right - LEFT) / HISTORY_S) * STEP_S - 1.5);
    for (const p of points) {
      const end = x(now - p.t - STEP_S);
      const left = end - wide;
      if (left < LEFT) continue;
      const sofar = Math.min(end, right) - left; // the last five seconds are not over
      const good = y(p.good / STEP_S);
      const all = y(p.judged / STEP_S);
      context.fillStyle = colour.good;
      context.fillRect(left, good, sofar, floor - good);
      context.fillStyle = colour.bad;
      context.fillRect(left, all, sofar, good - all);
    }
  }
}

function pieces(points) {
  const found = [];
  for (const point of points) {
    const last = found.at(-1);
    if (last && point.t - last.at(-1).t <= GAP_S) last.push(point);
    else found.push([point]);
  }
  return found;
}

/** What "now" is: at high rates less than a minute. */
function lately({ window_s }) {
  return window_s < 60 ? `the last ${Math.round(window_s)} seconds` : "the last minute";
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((m) => m * power).find((v) => v >= value);
}
