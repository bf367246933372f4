// The latest requests as a table, newest first, and the chosen one in detail.

import { fillBar, make, say, seconds } from "./draw.js";
import { detail, outcomeOf, stageParts, wayOf } from "./detail.js";

const SHOWN = 60;

export class Requests {
  constructor(section, model, selection) {
    this.model = model;
    this.selection = selection;
    this.body = section.querySelector("tbody");
    this.one = section.querySelector(".one");
    this.count = section.querySelector("#requests-count");
    this.rows = new Map(); // key → tr
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) selection.choose(row.dataset.key);
    });
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    selection.addEventListener("change", () => this.mark());
  }

  update() {
    const { model } = this;
    const latest = [...model.requests.values()].slice(-SHOWN);
    const wanted = new Set(latest.map((one) => one.key));
    for (const request of latest) {
      if (!this.rows.has(request.key)) {
        const row = this.row(request);
        this.rows.set(request.key, row);
        this.body.prepend(row);
      }
      const ago = Math.max(0, model.now() - request.at - request.end);
      say(this.rows.get(request.key).firstChild, agoText(ago));
    }
    // Only now: the newest row, which takes the focus of one that goes, is there.
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      if (row.contains(document.activeElement)) this.body.firstChild.focus();
      row.remove();
      this.rows.delete(key);
    }
    const text = latest.length ? `the last ${latest.length}` : "none yet";
    say(this.count, text);
    this.mark();
  }

  row(request) {
    const slo = this.model.router ? this.model.router.slo : {};
    const [outcome, kind] = outcomeOf(request);
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    const parts = stageParts(request, 0);
    fillBar(bar, parts, parts.reduce((sum, [, value]) => sum + value, 0) || 1);
    const late = (name) => (slo[name] && request[name] > slo[name] ? " over" : "");
    const retried = request.retries.length ? ` ↻${request.retries.length}` : "";
    return make("tr", { tabindex: -1, "data-key": request.key, "aria-selected": "false" },
      make("td", { class: "quiet" }),
      make("td", { class: "id", title: request.id }, request.id.slice(0, 12) || "–"),
      make("td", { class: "way", title: wayOf(request).join(" → ") }, wayOf(request).join(" → ") || "–", make("span", { class: "over" }, retried)),
      make("td", { class: "number" }, request.cached ? `${request.prompt} (${request.cached})` : `${request.prompt}`),
      make("td", { class: "number" }, `${request.tokens}`),
      make("td", { class: `number${late("ttft")}` }, seconds(request.ttft)),
      make("td", { class: `number${late("tpot")}` }, seconds(request.tpot)),
      make("td", { class: "wide" }, bar),
      make("td", { class: kind }, outcome));
  }

  mark() {
    const { key } = this.selection;
    let stop = this.rows.get(key) || this.body.firstChild;
    for (const row of this.rows.values()) {
      const chosen = String(row.dataset.key === key);
      if (row.getAttribute("aria-selected") !== chosen) row.setAttribute("aria-selected", chosen);
      row.tabIndex = row === stop ? 0 : -1;
    }
    const request = key && this.model.find(key);
    const shown = request ? `${key} ${request.end}` : "";
    if (this.shown === shown && request && request.end !== null) return;
    this.shown = shown;
    // What still runs changes twice a second, which nobody wants to have read out.
    this.one.setAttribute("aria-busy", String(Boolean(request && request.end === null)));
    if (request) this.one.replaceChildren(...detail(request, this.model.now()));
    else if (!this.one.querySelector(".hint")) {
      this.one.replaceChildren(make("p", { class: "hint quiet" },
        "Choose a request, here or in the picture above, to see where its time went."));
    }
  }

  onKey(event) {
    const row = event.target.closest("tr");
    if (!row) return;
    const next = { ArrowDown: row.nextSibling, ArrowUp: row.previousSibling }[event.key];
    if (next) {
      event.preventDefault();
      this.selection.choose(next.dataset.key);
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.selection.choose(row.dataset.key);
    }
  }
}

function agoText(value) {
  if (value < 60) return `${Math.floor(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return `${Math.floor(value / 3600)} h`;
}
