// Each worker under the roofs of its machine: how much it computes for each byte that it moves, and
// how fast, while it computes at all. Prefill belongs to the right of the ridge, decode to the left.

import {
  Surface, amount, colour, dot, faded, line, logScale, logTicks, make, percent, say, write,
} from "./draw.js";
import { trackOf } from "./model.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [62, 12, 14, 30];
const TRAIL = 24; // points

export class Roofline {
  constructor(section, model) {
    this.model = model;
    this.trails = new Map(); // worker → [{intensity, flops}], the last is the present
    this.canvas = section.querySelector("canvas");
    this.empty = section.querySelector(".empty");
    this.list = section.querySelector(".points");
    this.surface = new Surface(this.canvas, (...all) => this.paint(...all));
  }

  /** What there is to draw: workers with roofs, and where they are. */
  update() {
    const workers = this.model.workers().filter((w) => w.peak_flops > 0 && w.peak_bytes > 0);
    this.canvas.hidden = !workers.length;
    this.empty.hidden = workers.length > 0;
    const known = new Set(workers.map(trackOf));
    for (const name of this.trails.keys()) {
      if (!known.has(name)) this.trails.delete(name);
    }
    this.points = workers.map((worker) => {
      const rates = this.model.rates(worker);
      const trail = this.trails.get(trackOf(worker)) || [];
      this.trails.set(trackOf(worker), trail);
      const works = Boolean(rates && rates.intensity > 0);
      if (works) {
        trail.push({ intensity: rates.intensity, flops: rates.flops, bytes: rates.bytes });
        if (trail.length > TRAIL) trail.shift();
      }
      return { worker, trail, works };
    });
    this.describe();
    this.surface.draw();
  }

  /** The points in words. */
  describe() {
    const rows = this.points.map(({ worker, trail, works }) => [worker, place(worker, trail.at(-1), works)]);
    while (this.list.children.length > rows.length) this.list.lastChild.remove();
    rows.forEach(([worker, text], i) => {
      const row = this.list.children[i] || this.list.appendChild(make("li", {}, make("b"), make("span")));
      row.dataset.role = worker.role;
      say(row.firstChild, worker.id);
      say(row.lastChild, text);
    });
    const words = rows.map(([worker, text]) => `${worker.id}: ${text}`);
    this.canvas.setAttribute("aria-label", `Roofline. ${words.join(". ") || "No worker yet"}`);
  }

  paint(context, width, height) {
    if (!this.points || !this.points.length) return;
    const roofs = distinct(this.points.map(({ worker }) => worker));
    const places = this.points.flatMap(({ trail }) => trail);
    const ridges = roofs.map((roof) => roof.peak_flops / roof.peak_bytes);
    const low = Math.min(...ridges.map((r) => r / 30), ...places.map((p) => p.intensity / 1.6));
    const high = Math.max(...ridges.map((r) => r * 12), ...places.map((p) => p.intensity * 1.6));
    const top = Math.max(...roofs.map((r) => r.peak_flops)) * 1.7;
    const bottom = Math.min(...roofs.map((r) => r.peak_flops / 60), ...places.map((p) => p.flops / 1.6));
    const [right, floor] = [width - RIGHT, height - BOTTOM];
    const x = logScale(low, high, LEFT, right);
    const y = logScale(bottom, top, floor, TOP);
    this.axes(context, { low, high, bottom, top, x, y, right, floor });
    for (const roof of roofs) this.roof(context, roof, { low, high, x, y, right, floor });
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, right - LEFT + RIGHT, floor);
    context.clip();
    const drawn = this.points.filter(({ trail }) => trail.length);
    for (const point of drawn) this.point(context, point, x, y);
    this.names(context, drawn, x, y, right);
    context.restore();
  }

  axes(context, { low, high, bottom, top, x, y, right, floor }) {
    for (const value of logTicks(low, high, 6)) {
      line(context, [[x(value), TOP], [x(value), floor]], colour.grid, 1);
      write(context, `${+value.toPrecision(2)}`, x(value), floor + 9, colour["ink-3"], "center");
    }
    for (const value of logTicks(bottom, top, 5)) {
      line(context, [[LEFT, y(value)], [right, y(value)]], colour.grid, 1);
      write(context, amount(value, "F/s"), LEFT - 6, y(value), colour["ink-3"], "right");
    }
    write(context, "FLOP per byte moved", right, floor + 23, colour["ink-3"], "right");
  }

  roof(context, roof, { low, high, x, y, right, floor }) {
    const ridge = roof.peak_flops / roof.peak_bytes;
    const corner = [x(ridge), y(roof.peak_flops)];
    const begin = Math.max(low, 1e-12);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, right - LEFT, floor);
    context.clip();
    context.beginPath();
    context.moveTo(x(begin), y(begin * roof.peak_bytes));
    context.lineTo(...corner);
    context.lineTo(x(high), corner[1]);
    context.lineTo(x(high), floor);
    context.lineTo(x(begin), floor);
    context.fillStyle = faded("queue", 0.1);
    context.fill();
    line(context, [[x(begin), y(begin * roof.peak_bytes)], corner, [x(high), corner[1]]], colour["ink-2"], 1.6);
    line(context, [corner, [corner[0], floor]], colour.queue, 1, [2, 4]);
    context.restore();
    write(context, `compute ${amount(roof.peak_flops, "FLOP/s")}`, right - 2, corner[1] - 9, colour["ink-2"], "right");
    const angle = Math.atan2(corner[1] - y(low * roof.peak_bytes), corner[0] - x(low));
    context.save();
    context.translate(corner[0] - 0.46 * (corner[0] - LEFT), y((ridge * (low / ridge) ** 0.46) * roof.peak_bytes));
    context.rotate(angle);
    write(context, `memory ${amount(roof.peak_bytes, "B/s")}`, 0, -8, colour["ink-2"], "center");
    context.restore();
  }

  point(context, { worker, trail, works }, x, y) {
    const hue = worker.role;
    const path = trail.map((p) => [x(p.intensity), y(p.flops)]);
    line(context, path, faded(hue, 0.35), 1.5);
    const [px, py] = path.at(-1);
    dot(context, px, py, 5, works ? colour[hue] : colour.panel, colour[hue]);
  }

  /** Names beside points, where there is room; the list below has all of them. */
  names(context, drawn, x, y, right) {
    const taken = drawn.map(({ trail }) => {
      const last = trail.at(-1);
      return [x(last.intensity) - 6, x(last.intensity) + 6, y(last.flops)];
    });
    const free = (x0, x1, at, own) => taken.every(([a, b, row], i) => (
      i === own || b < x0 || a > x1 || Math.abs(row - at) > 12));
    drawn.forEach(({ worker }, i) => {
      const name = worker.id.split("-").at(-1);
      const wide = context.measureText(name).width;
      const [a, b, at] = taken[i];
      const middle = (a + b - wide) / 2;
      for (const [x0, row] of [[b + 4, at + 1], [middle, at + 15], [a - 4 - wide, at + 1]]) {
        if (x0 < LEFT || x0 + wide > right || !free(x0, x0 + wide, row, i)) continue;
        taken.push([x0, x0 + wide, row]);
        write(context, name, x0, row, colour[`${worker.role}-ink`]);
        break;
      }
    });
  }
}

function place(worker, last, works) {
  if (!last) return "has not computed yet";
  const [compute, memory] = [last.flops / worker.peak_flops, last.bytes / worker.peak_bytes];
  const bound = compute > memory ? `${percent(compute)} of compute` : `${percent(memory)} of memory`;
  return `${bound}, ${amount(last.intensity)} FLOP/B${works ? "" : ", idle now"}`;
}

/** One worker for each pair of ceilings: most have the same machine. */
function distinct(workers) {
  const found = new Map();
  for (const worker of workers) {
    const name = `${worker.peak_flops.toPrecision(2)} ${worker.peak_bytes.toPrecision(2)}`;
    if (!found.has(name)) found.set(name, worker);
  }
  return [...found.values()];
}
