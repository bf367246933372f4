// The page put together: one connection, one model, the parts that draw it.

import { Chat } from "./chat.js";
import { readColours, say } from "./draw.js";
import { Lanes } from "./lanes.js";
import { Goodput, Latency } from "./latency.js";
import { Model } from "./model.js";
import { Requests } from "./requests.js";
import { Roofline } from "./roofline.js";
import { Connection, key } from "./stream.js";
import { Workers } from "./workers.js";

const DELAY_S = 0.8; // the picture is so late: stages of running requests come twice a second
const FRAME_MS = 40;
const SHARE = 0.2; // of the time may go into the picture: one of many requests moves less smoothly
const LOST = "router not reachable"; // unless something answers, and says why

const KEPT = "It is kept until this tab is closed, and sent to this server only.";

const $ = (selector) => document.querySelector(selector);

/** The request that is looked at; "change" when it is another. */
class Selection extends EventTarget {
  constructor(model) {
    super();
    this.model = model;
    this.key = null; // chosen
    this.hover = null; // pointed at
  }

  choose(key) {
    this.key = key && key !== this.key ? key : null;
    this.dispatchEvent(new Event("change"));
  }

  point(key) {
    if (this.hover === key) return;
    this.hover = key;
    this.dispatchEvent(new Event("point"));
  }

  /** To the next request by the time of its beginning, or to the previous one. */
  step(by) {
    const all = [...this.model.requests.values(), ...this.model.live.values()];
    all.sort((a, b) => a.at - b.at);
    const i = all.findIndex((one) => one.key === this.key);
    const next = i < 0 ? all.at(-1) : all[Math.min(all.length - 1, Math.max(0, i + by))];
    if (next && next.key !== this.key) this.choose(next.key);
  }
}

readColours();
key.load();
const model = new Model();
const selection = new Selection(model);
const chat = new Chat($("#chat"), model, selection);
const lanes = new Lanes($("#lanes"), model, selection);
const requests = new Requests($("#requests"), model, selection);
const parts = [
  new Latency($("#ttft"), model, "ttft", "prefill"),
  new Latency($("#tpot"), model, "tpot", "decode"),
  new Goodput($("#goodput"), model),
  new Workers($("#workers"), model),
  new Roofline($("#roofline"), model),
  requests,
];
const still = matchMedia("(prefers-reduced-motion: reduce)");
let paused = false;
let state = "connecting";
let why = "";

function drawLanes() {
  lanes.draw(model.now() - DELAY_S);
}

function update() {
  if (!model.router) return;
  say($("#model"), model.router.model);
  say($("#router"), `router ${model.router.id}`);
  document.title = `Baton · ${model.router.model}`;
  for (const part of parts) part.update();
  drawLanes();
}

function onEvent(name, data) {
  if (name === "lost") return; // of events that came too fast for us; the next has all that counts
  for (const request of model.take(name, data)) chat.heard(request);
  if (!paused && name === "state" && !document.hidden) update();
}

function onState(now, reason = "") {
  const dialog = $("#key-dialog");
  if (now === "locked") {
    ask(key.value !== "");
    dialog.dataset.needed = true;
  } else if (now === "live" && dialog.dataset.needed === "true") { // no key is needed any more
    dialog.dataset.needed = false;
    dialog.close();
  }
  state = now;
  why = reason;
  showState();
}

function showState() {
  const shown = paused && state === "live" ? "paused" : state;
  const element = $("#connection");
  element.dataset.state = shown;
  const words = { lost: `${why || LOST}, trying again`, locked: "needs an API key" };
  say(element, words[shown] || shown);
  document.body.dataset.stale = state === "lost" || state === "locked";
}

function pause() {
  paused = !paused;
  $("#pause").setAttribute("aria-pressed", paused);
  showState();
  if (!paused) update();
}

function ask(refused = false) {
  const dialog = $("#key-dialog");
  say($("#key-why"), refused ? "The server did not accept this key." : KEPT);
  if (!dialog.open) dialog.showModal();
}

function frame(time) {
  requestAnimationFrame(frame);
  if (paused || still.matches || !model.router) return;
  if (time - frame.last < Math.max(FRAME_MS, lanes.cost / SHARE)) return;
  if (state !== "live" || !lanes.moves) return;
  frame.last = time;
  drawLanes();
}
frame.last = 0;

const COMMANDS = {
  "/": () => $("#question").focus(),
  "?": () => $("#help-dialog").showModal(),
  p: pause,
  t: () => document.dispatchEvent(new Event("toggletheme")),
  j: () => selection.step(1),
  k: () => selection.step(-1),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    chat.stop();
    selection.choose(null);
    return;
  }
  if (event.target.closest("input:not([type=radio]), textarea")) return;
  const command = COMMANDS[event.key];
  if (!command) return;
  event.preventDefault();
  command();
});

$("#pause").addEventListener("click", pause);
$("#theme").addEventListener("click", COMMANDS.t);
$("#help").addEventListener("click", COMMANDS["?"]);
$("#key").addEventListener("click", () => ask());
$("#key-cancel").addEventListener("click", () => $("#key-dialog").close());
$("#key-dialog form").addEventListener("submit", () => {
  key.set($("#key-field").value.trim());
  $("#key-field").value = "";
});
document.addEventListener("themechange", () => {
  readColours();
  if (!model.router) return;
  for (const part of parts) (part.surface ? part.surface.draw() : part.redraw?.());
  lanes.surface.draw();
});
selection.addEventListener("change", () => lanes.surface.draw());
selection.addEventListener("point", () => lanes.surface.draw());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) update();
});

new Connection("internal/events", onEvent, onState).run();
requestAnimationFrame(frame);
