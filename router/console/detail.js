// One request in words: its way, its stages, what became of it.

import { make, seconds } from "./draw.js";
import { stagesOf } from "./model.js";

const WORDS = {
  tokenize: "tokenize",
  queue: "queue",
  prefill: "prefill",
  transfer: "KV transfer",
  decode: "decode",
  lost: "lost",
};

/** Where it was computed, and where it went on: worker ids. */
export function wayOf(request) {
  const names = [];
  for (const [stage, , , worker] of request.spans) {
    if (worker && stage !== "lost" && stage !== "queue" && names.at(-1) !== worker) {
      names.push(worker);
    }
  }
  return names;
}

/** [text, class] of what became of it. */
export function outcomeOf(request) {
  if (request.end === null) return ["running", ""];
  if (request.code === 499) return ["cancelled", ""];
  if (request.code >= 400) return [`${request.code}`, "over"];
  return request.good === false ? ["late", "over"] : ["ok", ""];
}

/** The stages as a list; with ``tracks``, each with its place in the whole. */
export function stepList(request, now, tracks) {
  const whole = request.end === null ? Math.max(1e-3, now - request.at) : request.end || 1e-3;
  const list = make("dl", { class: "steps" });
  for (const [stage, start, end, worker] of request.spans) {
    const until = end === null ? Math.max(start, now - request.at) : end;
    const row = make("div", {},
      make("dt", {}, worker ? `${WORDS[stage]} · ${worker}` : WORDS[stage]),
      make("dd", {}, seconds(until - start)));
    if (tracks) {
      const part = make("i", { class: stage });
      part.style.left = `${(100 * start) / whole}%`;
      part.style.width = `${(100 * (until - start)) / whole}%`;
      row.append(make("dd", { class: "track", "aria-hidden": "true" }, part));
    }
    list.append(row);
  }
  if (request.ttft !== null) {
    list.append(make("div", {}, make("dt", {}, "first token"), make("dd", {}, seconds(request.ttft))));
  }
  return list;
}

/** The stages as parts of one bar. */
export function stageParts(request, now) {
  return [...stagesOf(request, now)];
}

/** What one looks up of a request: all of it. */
export function detail(request, now) {
  const way = wayOf(request);
  const [outcome, kind] = outcomeOf(request);
  const tokens = [
    `${request.prompt} prompt tokens`,
    request.cached ? `${request.cached} of them cached` : "",
    `${request.tokens} answered`,
    request.choices > 1 ? `${request.choices} answers, the first is shown` : "",
  ].filter(Boolean).join(", ");
  const parts = [
    make("h3", {}, request.id || "(refused before it had an id)"),
    make("p", {}, `${request.endpoint}${request.stream ? ", streamed" : ""}: `, make("span", { class: kind }, outcome)),
    make("p", {}, tokens),
  ];
  if (request.error) parts.push(make("p", { class: "over" }, request.error));
  if (way.length) parts.push(make("p", {}, way.join(" → ")));
  parts.push(stepList(request, now, true));
  if (request.tpot !== null) parts.push(make("p", {}, `then ${seconds(request.tpot)} per token`));
  for (const [at, why] of request.retries) {
    parts.push(make("p", { class: "over" }, `retried after ${seconds(at)}: ${why}`));
  }
  return parts;
}
