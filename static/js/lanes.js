// One lane's pane: head, figures, start-up phases, banner, status line. Writes only what changed.

import * as format from "./format.js";

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

const STATE_WORDS = {
  waiting: "Waiting to start", starting: "Starting", warming: "Warming up", ready: "Ready", failed: "Failed",
  stopped: "Stopped",
};

const WRITE = {
  ttft_ms: format.ms,
  ttft_browser_ms: format.ms,
  acceptance_rate: format.percent,
  tokens_per_step: (v) => format.decimal(v),
  output_tokens: format.count,
};

export class LaneView {
  constructor(article) {
    this.article = article;
    this.name = article.dataset.lane;
    const find = (selector) => article.querySelector(selector);
    this.rate = find('[data-figure="decode_tok_s"]');
    this.rateSpan = find("[data-rate-span]");
    this.cells = Object.fromEntries(
      [...Object.keys(WRITE), "total_ms"].map((key) => [key, find(`.figures [data-figure="${key}"]`)]),
    );
    this.banner = find(".lane-banner");
    this.bannerText = find(".lane-banner-text");
    this.restart = find("[data-restart]");
    this.start = find(".lane-start");
    this.startTitle = find(".lane-start-title");
    this.phases = find(".phases");
    this.empty = find(".lane-empty");
    this.status = find(".lane-status");
    this.copy = find("[data-copy]");
    this.standIn = find(".lane-stand-in");
    this.how = find(".lane-how");
    this.phasesSeen = new Map();
  }

  showFigures(figures, running) {
    setText(this.rate, format.rate(figures.rate));
    this.rate.toggleAttribute("data-none", figures.rate === null);
    setText(this.rateSpan, figures.rate === null ? "" : figures.rateSpan);
    for (const [key, write] of Object.entries(WRITE)) setText(this.cells[key], write(figures[key]));
    setText(this.cells.total_ms, format.seconds(figures.total_ms, running ? 1 : 2));
    this.article.classList.toggle("is-running", running);
  }

  clearFigures() {
    setText(this.rate, format.NONE);
    this.rate.toggleAttribute("data-none", true);
    setText(this.rateSpan, "");
    for (const cell of Object.values(this.cells)) setText(cell, format.NONE);
    this.article.classList.remove("is-running");
  }

  setBusy(busy) {
    this.article.setAttribute("aria-busy", String(busy));
  }

  /** Start-up, failure, and readiness, from `GET /api/state`. `runError`: why the lane dropped out of the run. */
  showState(state, runError) {
    const failed = state?.state === "failed";
    const error = failed ? state.error ?? "The engine failed." : runError;
    setHidden(this.banner, !error);
    if (error) setText(this.bannerText, error);
    setHidden(this.restart, !failed);
    this.lane = state;
    if (!this.starting) this.phasesSeen.clear();
    this.showPhases();
  }

  get starting() {
    return ["waiting", "starting", "warming"].includes(this.lane?.state);
  }

  /** The start-up list; elapsed time of the running phase goes on between two polls. */
  showPhases() {
    setHidden(this.start, !this.starting);
    if (!this.starting) return;
    setText(this.startTitle, STATE_WORDS[this.lane.state]);
    const now = performance.now();
    const phases = this.lane.phases ?? [];
    while (this.phases.children.length > phases.length) this.phases.lastChild.remove();
    while (this.phases.children.length < phases.length) {
      const item = document.createElement("li");
      item.append(document.createElement("span"), document.createElement("span"));
      this.phases.append(item);
    }
    phases.forEach((phase, i) => {
      const item = this.phases.children[i];
      item.classList.toggle("done", phase.done);
      setText(item.children[0], phase.name);
      setText(item.children[1], `${this.#elapsed(phase, now).toFixed(1)} s`);
    });
  }

  /** The server's figure, and this page's clock since it was told: elapsed time never stands still or goes back. */
  #elapsed(phase, now) {
    if (phase.done) return phase.elapsed_s;
    const began = Math.min(now - 1000 * phase.elapsed_s, this.phasesSeen.get(phase.name) ?? Infinity);
    this.phasesSeen.set(phase.name, began);
    return (now - began) / 1000;
  }

  get stateWord() {
    return STATE_WORDS[this.lane?.state] ?? "";
  }
}
