// A chat that streams, and what each answer cost: measured here, and told by the router.

import { fillBar, make, seconds } from "./draw.js";
import { outcomeOf, stageParts, wayOf } from "./detail.js";
import { key, problem, read } from "./stream.js";

const STORY = `A relay is four runners and one baton. The first leg is all power: out of the blocks, one
bend, everything at once. The others wait, and what they wait for is not the runner but the baton.
Between the legs lies a zone of thirty metres. The one who arrives is at full speed, the one who leaves
is nearly there, and for two strides both hands are on the same piece of aluminium. Nobody wins the race
in that zone, but many have lost it there. A baton that falls counts for nothing, however fast its
runner was; so teams practise the hand-off more than the running. They paint marks on the track, they
learn to reach back without looking, and they agree on one short word. A good exchange costs less time
than a single runner would have lost by growing tired, and that is the whole secret of the relay: four
runners who each do what they do best are faster than the best of them alone.`.replaceAll("\n", " ");

const IDEAS = [
  ["A short question", "What is a relay race?", 96],
  ["A long prompt", `${STORY} ${STORY} ${STORY}\n\nIn one sentence, what is this text about?`, 48],
  ["A long answer", "Write a story about a runner who forgot the baton.", 320],
];

export class Chat {
  constructor(section, model, selection) {
    this.model = model;
    this.selection = selection;
    this.talk = section.querySelector(".talk");
    this.form = section.querySelector("form");
    this.question = section.querySelector("#question");
    this.send = section.querySelector("#send");
    this.ideas = section.querySelector(".ideas");
    this.messages = [];
    this.notes = new Map(); // request id → where its note goes
    this.running = null;
    for (const [name, text, tokens] of IDEAS) {
      const ask = () => {
        section.querySelector("#max-tokens").value = tokens;
        this.ask(text);
      };
      this.ideas.append(make("button", { type: "button", onclick: ask }, name));
    }
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.ask(this.question.value.trim());
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.form.requestSubmit();
      }
    });
    this.hint();
    section.querySelector("#chat-new").addEventListener("click", () => this.clear());
  }

  clear() {
    this.stop();
    this.messages = [];
    this.notes.clear();
    this.hint();
    this.ideas.hidden = false;
    this.question.focus();
  }

  hint(text = "Ask something, and watch it go from the router to a prefill and on to a decode worker.") {
    this.talk.replaceChildren(make("p", { class: "hint" }, text));
  }

  stop() {
    if (this.running) this.running.abort();
  }

  async ask(text) {
    if (!text || this.running) return;
    if (!this.model.router) {
      this.hint("Nothing was heard of the router yet: see above.");
      return;
    }
    this.question.value = "";
    this.ideas.hidden = true;
    this.messages.push({ role: "user", content: text });
    this.say("user", text);
    const answer = this.say("assistant", "");
    answer.element.classList.add("waiting");
    this.running = new AbortController();
    this.send.textContent = "Stop";
    const messages = this.messages;
    try {
      const content = await this.stream(answer, this.running.signal);
      if (messages === this.messages) messages.push({ role: "assistant", content });
    } catch (error) {
      const stopped = error.name === "AbortError";
      const away = error instanceof TypeError; // what fetch and its streams say has no more in it
      answer.note.textContent = stopped ? "stopped" : away ? "the router cannot be reached" : error.message;
      answer.note.classList.toggle("error", !stopped);
      // Half an answer is part of the talk, none at all is not.
      const content = answer.said.textContent;
      if (messages === this.messages && content) messages.push({ role: "assistant", content });
      else if (messages === this.messages) messages.pop();
    } finally {
      answer.element.classList.remove("waiting");
      this.expect(answer);
      this.running = null;
      this.send.textContent = "Send";
    }
  }

  /** Show the answer as it comes; all of it at the end. */
  async stream(answer, signal) {
    const asked = performance.now();
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "content-type": "application/json", ...key.headers() },
      body: JSON.stringify({
        model: this.model.router.model,
        request_id: answer.id,
        messages: this.messages,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number(this.form.querySelector("#max-tokens").value) || 128,
        temperature: Number(this.form.querySelector("#temperature").value),
      }),
    });
    if (!response.ok) throw new Error(await problem(response));
    const times = [];
    let content = "";
    let tokens = 0;
    for await (const { data } of read(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const piece = chunk.choices.length ? chunk.choices[0].delta.content : "";
      if (!piece) continue;
      times.push(performance.now());
      content += piece;
      this.add(answer.said, piece);
    }
    answer.note.textContent = cost(asked, times, tokens);
    return content;
  }

  add(element, piece) {
    const { talk } = this;
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    if (!element.firstChild) element.append("");
    element.firstChild.appendData(piece);
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  }

  say(role, text) {
    this.talk.querySelector(".hint")?.remove();
    const said = make("div", { class: "said" }, text);
    const note = make("div", { class: "note" });
    const element = make("article", { class: role, "aria-label": role }, said, note);
    this.talk.append(element);
    this.talk.scrollTop = this.talk.scrollHeight;
    return { element, said, note, id: `console-${hex(8)}` };
  }

  /** Say where the answer was, when the router tells; it may have done so already. */
  expect(answer) {
    this.notes.set(answer.id, answer.note);
    for (const request of this.model.requests.values()) this.heard(request);
  }

  /** The router told of a request's end; if it was asked here, say where it was. */
  heard(request) {
    const note = this.notes.get(request.id);
    if (!note || outcomeOf(request)[0] === "running") return;
    this.notes.delete(request.id);
    const show = () => this.selection.key === request.key || this.selection.choose(request.key);
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    const parts = stageParts(request, 0);
    fillBar(bar, parts, parts.reduce((sum, [, value]) => sum + value, 0) || 1);
    const way = wayOf(request).join(" → ");
    note.append(make("br"), make("button", { type: "button", onclick: show, title: "Show it above" }, way || request.id), bar);
    if (this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 90) {
      this.talk.scrollTop = this.talk.scrollHeight;
    }
  }
}

/** What an answer took, as seen from here. */
function cost(asked, times, tokens) {
  const words = [`${tokens} tokens`];
  if (times.length) words.unshift(`first token ${seconds((times[0] - asked) / 1000)}`);
  if (times.length > 1 && tokens > 1) {
    words.push(`then ${seconds((times.at(-1) - times[0]) / 1000 / (tokens - 1))} each`);
  }
  return words.join(", ");
}

/** So many bytes by chance. An id of ours is one that no proxy between here and there changes. */
function hex(bytes) {
  const found = crypto.getRandomValues(new Uint8Array(bytes));
  return [...found].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
