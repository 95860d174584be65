// What the page knows of one run. Events go in, or a finished record; nothing here touches the DOM.

export const LANES = ["baseline", "speculative"];
export const TITLES = { baseline: "Baseline", speculative: "Speculative" };

function laneModel() {
  return {
    status: "waiting", // waiting, running, finished, cancelled, failed
    startedMs: null, // within the run, by the server's clock
    steps: [],
    tokens: 0,
    text: "",
    stats: null, // the latest lane_stats
    metrics: null, // final
    finishReason: null,
    error: null,
    note: null,
    browserTtftMs: null,
  };
}

export class RunModel {
  /** `postedAt`: performance.now() of the click that started the run, null for a viewer who only watches. */
  constructor(runId, postedAt = null) {
    this.runId = runId;
    this.postedAt = postedAt;
    this.status = "active"; // active, completed, cancelled, failed, gone
    this.source = null;
    this.mode = null;
    this.contended = null;
    this.request = null;
    this.pair = null;
    this.promptTokens = null;
    this.order = LANES;
    this.comparison = null;
    this.memory = null;
    this.lanes = { baseline: laneModel(), speculative: laneModel() };
    this.clockOffset = Infinity; // performance.now() at the run's t = 0, best estimate
  }

  get active() {
    return this.status === "active";
  }

  get scored() {
    return !this.active && this.status !== "gone";
  }

  #clock(tMs) {
    if (typeof tMs === "number") this.clockOffset = Math.min(this.clockOffset, performance.now() - tMs);
  }

  /** Takes one event. Returns the lane whose text grew, if any. */
  apply(type, data) {
    const lane = data.lane ? this.lanes[data.lane] : null;
    this.#clock(data.t_ms);
    switch (type) {
      case "run":
        this.source = data.source;
        this.mode = data.mode;
        this.contended = data.contended;
        this.request = data.request;
        this.pair = data.pair;
        this.promptTokens = data.prompt_tokens;
        this.order = data.order ?? LANES;
        break;
      case "lane_started":
        lane.status = "running";
        lane.startedMs = data.t_ms;
        break;
      case "steps":
        lane.steps.push(...data.steps);
        for (const step of data.steps) {
          lane.tokens += step.ids.length;
          lane.text += step.text;
        }
        return data.lane;
      case "lane_stats":
        lane.stats = data;
        break;
      case "memory":
        this.memory = data.memory;
        break;
      case "lane_finished":
        lane.status = data.finish_reason === "cancelled" ? "cancelled" : "finished";
        lane.finishReason = data.finish_reason;
        lane.metrics = data.metrics;
        break;
      case "lane_failed":
        lane.status = "failed";
        lane.error = data.error;
        break;
      case "comparison":
        this.comparison = data.comparison;
        break;
      case "end":
        this.status = data.status;
        break;
      default:
    }
    return null;
  }

  /** Takes the record, which has the last word on steps. */
  applyRecord(record) {
    this.status = record.status;
    this.source = record.source;
    this.mode = record.mode;
    this.contended = record.contended;
    this.request = record.request;
    this.pair = record.pair;
    this.comparison = record.comparison;
    this.order = record.request?.lanes ?? LANES;
    for (const name of LANES) {
      const from = record.lanes[name];
      const lane = this.lanes[name];
      if (!from) continue;
      lane.steps = from.steps;
      lane.text = from.text;
      lane.tokens = from.steps.reduce((n, s) => n + s.ids.length, 0);
      lane.startedMs = from.started_ms;
      lane.finishReason = from.finish_reason;
      lane.error = from.error;
      lane.note = from.reconciled === false ? from.note : null;
      lane.metrics = from.metrics;
      this.promptTokens = from.prompt_tokens;
      if (record.status !== "active") {
        lane.status = from.error ? "failed" : from.finish_reason === "cancelled" ? "cancelled"
          : from.finish_reason ? "finished" : "waiting";
      }
    }
  }

  /** Milliseconds since the lane's request was handed in; frozen once the lane has ended. */
  elapsedMs(name) {
    const lane = this.lanes[name];
    if (lane.metrics) return lane.metrics.total_ms;
    if (lane.status === "failed" || !this.active) return lane.steps.at(-1)?.t_ms ?? null;
    if (lane.status !== "running" || this.clockOffset === Infinity) return null;
    return Math.max(0, performance.now() - this.clockOffset - lane.startedMs);
  }

  /** The figures of a lane as they stand: final metrics, else the live ones. */
  figures(name) {
    const lane = this.lanes[name];
    const live = lane.stats ?? {};
    const m = lane.metrics;
    return {
      rate: m ? m.decode_tok_s : live.recent_tok_s ?? live.decode_tok_s ?? null,
      rateSpan: m ? "whole decode" : lane.status === "running" ? "last 2 s" : "",
      decode_tok_s: (m ?? live).decode_tok_s ?? null,
      ttft_ms: (m ?? live).ttft_ms ?? null,
      ttft_browser_ms: lane.browserTtftMs,
      acceptance_rate: (m ?? live).acceptance_rate ?? null,
      tokens_per_step: (m ?? live).tokens_per_step ?? null,
      output_tokens: m ? m.output_tokens : lane.status === "waiting" ? null : lane.tokens,
      total_ms: this.elapsedMs(name),
      acceptance_by_position: (m ?? live).acceptance_by_position ?? null,
    };
  }

  /** Called once the first token of a lane has been painted. */
  painted(name, now) {
    const lane = this.lanes[name];
    if (lane.browserTtftMs !== null || this.postedAt === null) return;
    const first = this.order[0] === name || this.mode === "together";
    lane.browserTtftMs = now - (first ? this.postedAt : this.clockOffset + lane.startedMs);
  }
}

/** The user's own words of a request, for the strip that names a run. */
export function promptOf(request) {
  return request?.messages?.findLast((m) => m.role === "user")?.content ?? "";
}

export function settingsOf(request) {
  if (!request) return "";
  const parts = [
    request.mode === "in_turn" ? "in turn" : "together",
    `T ${request.temperature}`,
    `top-p ${request.top_p}`,
    `${request.max_tokens} tokens`,
    `seed ${request.seed}`,
  ];
  if (request.json_schema) parts.push("JSON schema");
  return parts.join(" · ");
}

/** Decode speed over time from exact steps: tokens per second over a sliding window, linear between steps. */
export function rateSeries(steps, grid, windowMs) {
  if (steps.length < 2) return grid.map(() => null);
  const times = [];
  const counts = [];
  let n = 0;
  for (const step of steps) {
    n += step.ids.length;
    times.push(step.t_ms);
    counts.push(n);
  }
  const first = times[0];
  const last = times.at(-1);
  const at = (t) => {
    let lo = 0;
    let hi = times.length - 1;
    while (hi - lo > 1) {
      const mid = (lo + hi) >> 1;
      if (times[mid] <= t) lo = mid;
      else hi = mid;
    }
    const span = times[hi] - times[lo];
    return span > 0 ? counts[lo] + ((counts[hi] - counts[lo]) * (t - times[lo])) / span : counts[hi];
  };
  return grid.map((t) => {
    const from = Math.max(first, t - windowMs);
    if (t > last || t - from < windowMs / 4) return null;
    return (1000 * (at(t) - at(from))) / (t - from);
  });
}
