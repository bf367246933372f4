// What is known of the router, its workers and the latest requests. Knows nothing of the page.

export const KEEP_REQUESTS = 800;
export const HISTORY_S = 300;
const TRACK_S = 90; // of each worker's counters
const RATE_S = 10;
const ROLES = ["prefill", "mixed", "decode"];

export class Model {
  constructor() {
    this.router = null; // what the last event said, see feed.py
    this.requests = new Map(); // key → ended ones, in the order in which they came
    this.live = new Map(); // key → those that run
    this.history = new Map(); // time → percentiles of five seconds
    this.tracks = new Map(); // worker → [counters with their time]
    this.seen = 0; // time of the last event, the server's clock
    this.clock = null; // server's clock less this page's
    this.complete = 0; // all requests are known that have ended since then
  }

  /** Take an event over; the requests that it brought the end of. */
  take(name, data) {
    if (name === "hello") return this.hello(data);
    if (name === "state") return this.state(data);
    return [];
  }

  hello(data) {
    this.clock = null;
    this.tick(data.t);
    this.live.clear();
    this.merge(data.history);
    if (data.cut) this.complete = Math.max(this.complete, endOf(data.ended[0]));
    return this.add(data.ended);
  }

  state(data) {
    this.tick(data.t);
    this.router = data;
    this.merge(data.history);
    const ended = this.add(data.ended);
    this.live = new Map(data.live.map((one) => [keyOf(one), { ...one, key: keyOf(one) }]));
    this.track(data);
    return ended;
  }

  /** Seconds since 1970 by the server's clock, standing still when nothing is heard of it. */
  now() {
    if (this.clock === null) return this.seen;
    return Math.min(performance.now() / 1000 + this.clock, this.seen + 1.5);
  }

  find(key) {
    return this.live.get(key) || this.requests.get(key);
  }

  /** All that overlap [from, to], in the order of their beginning. */
  within(from, to) {
    const found = [];
    for (const one of this.requests.values()) {
      if (one.at <= to && one.at + one.end >= from) found.push(one);
    }
    for (const one of this.live.values()) {
      if (one.at <= to) found.push(one);
    }
    return found.sort((a, b) => a.at - b.at);
  }

  /** Workers by pool: prefill, mixed, decode. */
  workers() {
    const all = this.router ? this.router.workers : [];
    const place = (one) => ROLES.indexOf(one.role);
    return [...all].sort((a, b) => place(a) - place(b) || (a.id < b.id ? -1 : 1));
  }

  /** What a worker did in its last seconds, or null as long as that cannot be said. */
  rates(worker, seconds = RATE_S) {
    const track = this.tracks.get(trackOf(worker));
    if (!track || track.length < 2) return null;
    const last = track[track.length - 1];
    let first = track[track.length - 2];
    for (const one of track) {
      if (last.t - one.t <= seconds) {
        first = one;
        break;
      }
    }
    return ratesBetween(first, last);
  }

  /** Tokens per second of a worker for each of the last seconds: [{t, value}]. */
  pace(worker, field) {
    const track = this.tracks.get(trackOf(worker)) || [];
    const found = [];
    for (let i = 4; i < track.length; i += 2) {
      const dt = track[i].t - track[i - 4].t;
      found.push({ t: track[i].t, value: (track[i][field] - track[i - 4][field]) / dt });
    }
    return found;
  }

  // --- inside -------------------------------------------------------------------------------

  tick(t) {
    // An event is late by its way here, never early: the largest difference is the best.
    const candidate = t - performance.now() / 1000;
    this.clock = this.clock === null ? candidate : Math.max(this.clock - 0.002, candidate);
    this.seen = t;
  }

  merge(points) {
    for (const point of points) this.history.set(point.t, point);
    for (const t of this.history.keys()) {
      if (t < this.seen - HISTORY_S - 10) this.history.delete(t);
    }
  }

  add(ended) {
    const fresh = [];
    for (const one of ended) {
      const key = keyOf(one);
      this.live.delete(key);
      if (this.requests.has(key)) continue;
      const request = { ...one, key };
      this.requests.set(key, request);
      fresh.push(request);
    }
    for (const [key, one] of this.requests) {
      if (this.requests.size <= KEEP_REQUESTS) break;
      this.requests.delete(key);
      this.complete = Math.max(this.complete, endOf(one));
    }
    return fresh;
  }

  track(data) {
    for (const worker of data.workers) {
      const name = trackOf(worker);
      const track = this.tracks.get(name) || [];
      this.tracks.set(name, track);
      track.push({
        t: data.t,
        generated: worker.generated_tokens,
        computed: worker.computed_prompt_tokens,
        pulled: worker.pulled_bytes,
        flops: worker.flops,
        bytes: worker.bytes,
        busy: worker.busy_s,
      });
      while (track[0].t < data.t - TRACK_S) track.shift();
    }
    for (const [name, track] of this.tracks) {
      if (track[track.length - 1].t < data.t - TRACK_S) this.tracks.delete(name);
    }
  }
}

export function ratesBetween(first, last) {
  const dt = last.t - first.t;
  const busy = last.busy - first.busy;
  const flops = last.flops - first.flops;
  const bytes = last.bytes - first.bytes;
  const computes = busy > 0 && flops > 0 && bytes > 0;
  return {
    generated: (last.generated - first.generated) / dt,
    computed: (last.computed - first.computed) / dt,
    pulled: (last.pulled - first.pulled) / dt,
    busy: Math.min(1, busy / dt),
    flops: computes ? flops / busy : 0, // per second of work
    bytes: computes ? bytes / busy : 0,
    intensity: computes ? flops / bytes : 0,
  };
}

/** Clients may use an id twice. */
export function keyOf(request) {
  return `${request.id}@${request.at}`;
}

/** Time of its end. */
function endOf(request) {
  return request.at + request.end;
}

export function trackOf(worker) {
  return `${worker.id}/${worker.epoch}`;
}

/** Seconds in each stage; of one that goes on, so far. */
export function stagesOf(request, now) {
  const found = new Map();
  for (const [stage, start, end] of request.spans) {
    const until = end === null ? Math.max(start, now - request.at) : end;
    found.set(stage, (found.get(stage) || 0) + until - start);
  }
  return found;
}
