// Server-sent events over fetch (EventSource cannot send an API key), and a connection that comes
// back: after a restart of the router, a sleep of the laptop, a key that was missing.

const SILENCE_MS = 6000; // an event comes twice a second: after so long nobody is there
const HIDDEN_MS = 20000; // a page that nobody looks at for so long listens no more
const LONGEST_MS = 4000; // between attempts
const LOCKED_MS = 30000; // the same without a key that is accepted: there may be no need of one later

export const key = {
  value: "",
  load() {
    try {
      this.value = sessionStorage.getItem("baton-key") || "";
    } catch {
      this.value = ""; // storage is blocked: the key holds until the page is left
    }
  },
  set(value) {
    this.value = value;
    try {
      sessionStorage.setItem("baton-key", value);
    } catch {
      // as above
    }
    document.dispatchEvent(new Event("keychange"));
  },
  /** A header takes bytes, one a character: those of the key in UTF-8, as the server reads them. */
  headers() {
    if (!this.value) return {};
    const bytes = String.fromCharCode(...new TextEncoder().encode(this.value));
    return { authorization: `Bearer ${bytes}` };
  },
};

/** What a server says that answers, but not with what it was asked for. */
export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The events of a response as they come: {name, data}, where data is text. */
export async function* read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = { name: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Follows ``url`` for ever. ``onEvent(name, object)``; ``onState(state, why)``: live | lost | locked;
 * ``why`` of a server that answers is what it says, empty where none does.
 */
export class Connection {
  constructor(url, onEvent, onState) {
    this.url = url;
    this.onEvent = onEvent;
    this.onState = onState;
    this.failures = 0;
    this.why = "";
    this.last = ""; // how the last attempt ended
    this.wake = () => {};
    this.abort = new AbortController();
    document.addEventListener("visibilitychange", () => this.look());
    document.addEventListener("keychange", () => this.again());
    addEventListener("online", () => this.again());
  }

  async run() {
    for (;;) {
      if (this.resting) await this.pause(Infinity);
      const status = await this.follow();
      if (this.resting) continue;
      const again = status === this.last;
      this.last = status;
      if (status === 401) {
        if (!again) this.onState("locked"); // who has closed the question is not asked once more
        await this.pause(LOCKED_MS);
      } else if (status !== "ended") {
        this.failures += 1;
        if (this.failures > 1 || status === "refused") this.onState("lost", this.why);
        await this.pause(Math.min(LONGEST_MS, 200 * 2 ** Math.min(this.failures, 8)));
      }
    }
  }

  /** One connection, to its end: "ended", "broken", "refused" (``why`` may say more), or 401. */
  async follow() {
    this.abort = new AbortController();
    this.why = "";
    let heard = 0;
    let timer = 0;
    const listen = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
    };
    try {
      listen();
      const options = { headers: key.headers(), signal: this.abort.signal, cache: "no-store" };
      const response = await fetch(this.url, options);
      if (response.status === 401) return 401;
      if (!response.ok) {
        this.why = await problem(response);
        return "refused";
      }
      for await (const event of read(response)) {
        listen();
        heard += 1;
        if (heard === 2) this.failures = 0; // the first one comes from a router that stops, too
        this.onState("live");
        this.tell(event);
      }
      return heard > 1 ? "ended" : "broken";
    } catch {
      return heard ? "broken" : "refused";
    } finally {
      clearTimeout(timer);
    }
  }

  tell(event) {
    try {
      this.onEvent(event.name, JSON.parse(event.data));
    } catch (error) {
      console.error(error); // a picture that cannot be drawn must not end the connection
    }
  }

  /** Wait, but not past a wish to go on at once. */
  pause(ms) {
    return new Promise((resolve) => {
      const timer = ms === Infinity ? 0 : setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  again() {
    this.failures = 0;
    this.last = "";
    this.resting = false;
    this.abort.abort();
    this.wake();
  }

  look() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.resting = true;
        this.abort.abort();
      }, HIDDEN_MS);
    } else if (this.resting) {
      this.again();
    }
  }
}
