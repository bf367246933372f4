// Pools and their workers: state, what runs and waits, KV blocks, pace.

import { Surface, amount, colour, faded, fillBar, line, make, percent, say } from "./draw.js";
import { trackOf } from "./model.js";

const NAMES = { prefill: "Prefill", mixed: "Mixed", decode: "Decode" };
const SPARK_S = 60;

export class Workers {
  constructor(section, model) {
    this.pools = section.querySelector(".pools");
    this.model = model;
    this.rows = new Map(); // worker → its elements
    this.heads = new Map(); // role → its elements
  }

  update() {
    const workers = this.model.workers();
    const known = new Set(workers.map(trackOf));
    for (const [name, row] of this.rows) {
      if (!known.has(name)) {
        row.element.remove();
        this.rows.delete(name);
      }
    }
    const { pools = {}, start_failures: failures = [] } = this.model.router || {};
    for (const role of Object.keys(NAMES)) {
      const failed = failures.find((one) => one.role === role);
      this.pool(role, workers.filter((worker) => worker.role === role), pools[role], failed);
    }
    for (const worker of workers) this.worker(worker);
  }

  redraw() {
    for (const row of this.rows.values()) row.spark.draw();
  }

  /** ``wanted``: what there should be, and why; ``failed``: the latest start that did. */
  pool(role, workers, wanted, failed) {
    let head = this.heads.get(role);
    if (!workers.length && !wanted?.target && !wanted?.scales && !failed) {
      if (head) head.element.remove();
      this.heads.delete(role);
      return;
    }
    if (!head) {
      const [text, why, bad] = [make("span"), make("p", { class: "why" }), make("p", { class: "why bad" })];
      const element = make("div", { class: "pool", "data-role": role },
        make("h3", {}, make("b", {}, NAMES[role]), text), why, bad);
      head = { element, text, why, bad };
      this.heads.set(role, head);
      const order = Object.keys(NAMES);
      const after = [...this.pools.children].find(
        (other) => order.indexOf(other.dataset.role) > order.indexOf(role));
      this.pools.insertBefore(element, after || null);
    }
    const ready = workers.filter((worker) => worker.state === "ready").length;
    const rates = workers.map((worker) => this.model.rates(worker)).filter(Boolean);
    const sum = (field) => rates.reduce((all, rate) => all + rate[field], 0);
    const total = (field) => workers.reduce((all, worker) => all + worker[field], 0);
    const there = workers.length;
    const words = [!there ? "no worker" : ready === there ? `${ready} ready` : `${ready} of ${there} ready`];
    if (wanted && wanted.target !== null && (wanted.scales || wanted.target !== there)) words.push(`target ${wanted.target}`);
    if (there && role !== "decode") words.push(`${amount(sum("computed"))} prompt tokens/s`);
    if (there && role !== "prefill") words.push(`${amount(sum("generated"))} tokens/s`);
    if (role !== "prefill" && sum("pulled") > 0) words.push(`KV in ${amount(sum("pulled"), "B/s")}`);
    if (role !== "decode" && total("waiting_tokens")) words.push(`${amount(total("waiting_tokens"))} tokens to compute`);
    say(head.text, words.join(" · "));
    say(head.why, wanted?.reason ? `${wanted.reason.replace("_", " ")}: ${wanted.words}` : "");
    say(head.bad, failed ? `${startsOf(failed.in_a_row)}: ${failed.message}` : "");
  }

  worker(worker) {
    const name = trackOf(worker);
    const row = this.rows.get(name) || this.row(worker, name);
    const state = worker.stalled ? "stalled" : worker.state;
    row.element.dataset.state = state;
    say(row.name, worker.id);
    row.element.title = `${worker.id}, pid ${worker.pid}, ${worker.host}:${worker.port}, ${worker.transport || "no transport"}`;
    const doing = state === "ready" ? `${worker.running} running, ${worker.waiting} waiting` : state;
    say(row.doing, doing);
    const { blocks } = worker;
    const used = (blocks.active || 0) + (blocks.leased || 0) + (blocks.quarantined || 0);
    fillBar(row.bar, ["active", "leased", "quarantined", "cached"].map((kind) => [kind, blocks[kind] || 0]), worker.kv_blocks);
    row.bar.setAttribute("aria-label", `KV blocks: ${used} of ${worker.kv_blocks} in use, ${blocks.cached || 0} cached`);
    say(row.kv, `KV ${percent(used / worker.kv_blocks)} of ${worker.kv_blocks.toLocaleString("en")}`);
    const rates = this.model.rates(worker);
    const pace = rates ? (worker.role === "prefill" ? rates.computed : rates.generated) : 0;
    say(row.pace, rates ? `${amount(pace)} tok/s` : "–");
    say(row.busy, rates ? `busy ${percent(rates.busy)}` : "");
    row.spark.draw();
  }

  row(worker, key) {
    const bar = make("div", { class: "bar", role: "img" });
    const [name, doing, kv, pace, busy] = [make("b"), make("small"), make("small"), make("div"), make("small")];
    const canvas = make("canvas", { "aria-hidden": "true" });
    const element = make("div", { class: "worker" },
      make("div", { class: "name" }, name),
      make("div", {}, doing),
      make("div", { class: "kv" }, bar, kv),
      make("div", { class: "rate" }, pace, busy),
      canvas);
    this.heads.get(worker.role).element.append(element);
    const field = worker.role === "prefill" ? "computed" : "generated";
    const spark = new Surface(canvas, (context, width, height) => {
      sparkline(context, width, height, this.model.pace(worker, field), this.model.seen, worker.role);
    });
    const row = { element, name, doing, bar, kv, pace, busy, spark };
    this.rows.set(key, row);
    return row;
  }
}

function startsOf(count) {
  return count > 1 ? `the last ${count} starts failed` : "a start failed";
}

function sparkline(context, width, height, points, now, hue) {
  line(context, [[0, height - 1], [width, height - 1]], colour.grid, 1);
  if (points.length < 2) return;
  const most = Math.max(1, ...points.map((point) => point.value));
  const at = ({ t, value }) => [
    width - ((now - t) / SPARK_S) * width,
    height - 1 - (Math.max(0, value) / most) * (height - 4),
  ];
  const path = points.filter((point) => now - point.t <= SPARK_S).map(at);
  if (path.length < 2) return;
  context.beginPath();
  context.moveTo(path[0][0], height - 1);
  for (const [x, y] of path) context.lineTo(x, y);
  context.lineTo(path.at(-1)[0], height - 1);
  context.fillStyle = faded(hue, 0.16);
  context.fill();
  line(context, path, colour[hue], 1.4);
}
