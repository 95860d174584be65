// The page. State comes from a poll of /api/state, a run's events from one EventSource; everything is drawn
// in one animation-frame loop. Only Run, Stop, Restart and F ever send anything that changes the server.

import * as api from "./api.js";
import { AcceptanceBars, MemoryBars, RateChart } from "./charts.js";
import { Controls } from "./controls.js";
import * as format from "./format.js";
import { FrameLoop } from "./frames.js";
import { LaneView, setHidden, setText } from "./lanes.js";
import { TokenPane } from "./pane.js";
import { Playback } from "./playback.js";
import { LANES, RunModel, TITLES, promptOf, settingsOf } from "./run.js";
import { RunStream } from "./stream.js";
import { Tooltip } from "./tooltip.js";
import { Verdict } from "./verdict.js";

const POLL_STARTING_MS = 1000;
const POLL_IDLE_MS = 2000;
const CHART_EVERY_MS = 250;

const $ = (selector) => document.querySelector(selector);
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** Counters for tests and for the curious: `window.specduel.stats`. Times are `Date.now()` milliseconds. */
const stats = { frames: 0, writes: { baseline: 0, speculative: 0 }, posts: 0, streams: 0, endedAt: null };

/** Whether a click on a dialog hit what is around it. */
function onBackdrop(event) {
  const box = event.target.getBoundingClientRect();
  const inside = event.clientX >= box.left && event.clientX <= box.right && event.clientY >= box.top && event.clientY <= box.bottom;
  return !inside;
}

class Page {
  constructor() {
    this.state = null;
    this.run = null;
    this.stream = null;
    this.playback = null;
    this.posting = false;
    this.lost = false;
    this.unreachable = false;
    this.dirty = true;
    this.chartAt = 0;
    this.chartDirty = true;

    this.controls = new Controls($("#controls"));
    this.views = {};
    this.panes = {};
    for (const name of LANES) {
      const article = $(`[data-lane="${name}"]`);
      this.views[name] = new LaneView(article);
      this.panes[name] = new TokenPane(article, () => {
        stats.writes[name] += 1;
      });
    }
    this.verdict = new Verdict(document);
    this.rateChart = new RateChart($("#rate-chart"));
    this.acceptance = new AcceptanceBars($("#acceptance-bars"), $("#acceptance-empty"));
    this.memory = new MemoryBars($("#memory-bars"), $("[data-memory-kind]"));
    this.tooltip = new Tooltip($("#tooltip"), (term, lane) => this.reasonFor(term, lane));
    this.loop = new FrameLoop((now) => this.draw(now), stats);
    this.wire();
  }

  // ---- wiring ----

  wire() {
    $("#controls").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start(this.controls.request.bind(this.controls));
    });
    $("#stop").addEventListener("click", () => this.stop());
    $("#fair").addEventListener("click", () => this.measureFair());
    $("#replay").addEventListener("click", () => this.play());
    $("#skip").addEventListener("click", () => this.skipPlayback());
    for (const radio of document.querySelectorAll('[name="rate"]')) {
      radio.addEventListener("change", () => {
        if (this.playback) this.playback.rate = Number(radio.value);
      });
    }
    $("#marks").addEventListener("change", (event) => {
      document.documentElement.classList.toggle("marks-off", !event.target.checked);
    });
    for (const button of document.querySelectorAll("[data-restart]")) {
      button.addEventListener("click", () => this.restart(button));
    }
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.copy(button));
    }
    $("[data-dismiss]").addEventListener("click", () => setHidden($("#notice"), true));
    for (const [button, dialog] of [["#open-help", "#help"], ["#fairness", "#settings"], ["#open-method", "#method"]]) {
      $(button)?.addEventListener("click", () => $(dialog).showModal());
    }
    document.addEventListener("click", (event) => {
      if (event.target.closest("#open-library")) $("#library").showModal();
      if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
      if (event.target.closest("[data-pick]")) $("#library").close();
      if (event.target.nodeName === "DIALOG" && onBackdrop(event)) event.target.close();
    });
    $("#method").addEventListener("submit", (event) => {
      event.preventDefault();
      this.switchMethod(event.target);
    });
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) {
        this.loop.request();
        this.poll();
      }
    });
  }

  key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!document.querySelector("dialog[open]")) this.start(() => this.controls.request());
      return;
    }
    if (event.key === "Escape") {
      if (document.querySelector("dialog[open]")) return;
      if (this.tooltip.visible) this.tooltip.hide();
      this.controls.closeSchema();
      if (this.run?.active) this.stop();
      else if (this.playback) this.skipPlayback();
      else document.activeElement?.blur(); // out of the prompt, back to the keys
      return;
    }
    const typing = event.target.matches?.('textarea, input:not([type="radio"]):not([type="checkbox"])');
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const action = {
      "?": () => $("#help").showModal(),
      f: () => this.measureFair(),
      p: () => $("#open-library").click(),
      m: () => $("#marks").click(),
    }[event.key.toLowerCase()];
    if (action) {
      event.preventDefault();
      action();
    }
  }

  // ---- what changes the server ----

  async start(requestOf) {
    if (this.posting || this.run?.active || !(this.state?.ready || this.soloLane)) return;
    const request = requestOf();
    if (!request) return;
    if (this.soloLane) request.lanes = [this.soloLane];
    this.posting = true;
    stats.posts += 1;
    const postedAt = performance.now();
    this.refresh();
    try {
      const { run_id: runId, events_url: url } = await api.startRun(request);
      this.attach(runId, url, postedAt);
    } catch (error) {
      this.controls.showError(error.param, error.message);
      if (error.status === 409 || error.status === 503) this.poll();
    } finally {
      this.posting = false;
      this.refresh();
    }
  }

  async stop() {
    if (!this.run?.active || this.stopping) return;
    this.stopping = true;
    this.refresh();
    try {
      await api.stopRun(this.run.runId);
    } catch (error) {
      this.notify(error.message);
    } finally {
      this.stopping = false;
      this.refresh();
    }
  }

  get canMeasureFair() {
    const run = this.run;
    return Boolean(run && run.status === "completed" && run.mode === "together" && run.contended && run.source !== "replay");
  }

  measureFair() {
    if (!this.canMeasureFair) return;
    const request = Object.fromEntries(
      Object.entries(this.run.request).filter(([, value]) => value !== null && value !== undefined),
    );
    this.start(() => ({ ...request, mode: "in_turn" }));
  }

  async restart(button) {
    button.disabled = true;
    try {
      await api.restartLane(button.dataset.restart);
      await this.poll();
    } catch (error) {
      this.notify(error.message);
    } finally {
      button.disabled = false;
    }
  }

  /** Another method for the speculative lane; it starts again, and the poll shows how far it is. */
  async switchMethod(form) {
    const fields = new FormData(form);
    const drafted = fields.get("num_speculative_tokens").trim();
    const error = form.querySelector("#method-error");
    const wanted = { method: fields.get("method") };
    if (drafted !== "") wanted.num_speculative_tokens = Number.isNaN(Number(drafted)) ? drafted : Number(drafted);
    setHidden(error, true);
    try {
      await api.switchMethod(wanted);
      $("#method").close();
      await this.poll();
    } catch (refusal) {
      setText(error, refusal.message);
      setHidden(error, false);
    }
  }

  /** The lane that can still run while the other one has failed. */
  get soloLane() {
    const states = LANES.map((name) => this.state?.lanes[name].state);
    const at = states.indexOf("ready");
    return at >= 0 && states[1 - at] === "failed" ? LANES[at] : null;
  }

  // ---- following a run ----

  attach(runId, url, postedAt = null) {
    if (this.run?.runId === runId) return;
    this.stream?.close();
    this.check?.abort();
    this.endPlayback();
    const run = new RunModel(runId, postedAt);
    this.run = run;
    stats.streams += 1;
    stats.endedAt = null;
    for (const name of LANES) this.panes[name].clear();
    this.rateChart.clear();
    this.lost = false;
    this.stream = new RunStream(runId, url, {
      onEvent: (type, data) => this.event(run, type, data),
      onLost: (lost) => {
        this.lost = lost;
        this.refresh();
      },
      onGone: () => {
        if (run !== this.run) return;
        this.stream = null;
        this.lost = false;
        this.loadRecord(run);
      },
    });
    this.refresh();
  }

  event(run, type, data) {
    if (run !== this.run) return;
    const grown = run.apply(type, data);
    if (grown) for (const step of data.steps) this.panes[grown].push(step);
    if (type === "run") this.announce(`Run started, ${run.mode === "in_turn" ? "in turn" : "together"}.`);
    if (type === "lane_finished" || type === "lane_failed") {
      const lane = data.lane;
      this.panes[lane].end();
      this.announce(type === "lane_failed" ? `${TITLES[lane]} failed: ${data.error.message}`
        : `${TITLES[lane]} ${data.finish_reason === "cancelled" ? "stopped" : "finished"}: ${format.rate(data.metrics.decode_tok_s)} tokens per second.`);
    }
    if (type === "end") this.ended(run);
    this.chartDirty = true;
    this.dirty = true;
    this.loop.request();
  }

  ended(run) {
    this.stream = null;
    this.lost = false;
    this.controls.clearErrors();
    for (const name of LANES) this.panes[name].end();
    this.draw(performance.now());
    stats.endedAt = Date.now();
    this.announce(this.verdict.summary(run));
    this.refresh();
    this.loadRecord(run, { play: true });
    this.poll();
  }

  /** The record has the last word on steps; it also answers when the stream can't be had any more. */
  async loadRecord(run, { play = false } = {}) {
    try {
      const record = await api.getRecord(run.runId);
      if (run !== this.run) return;
      const live = run.lanes.speculative.steps.length;
      const wasActive = run.active;
      run.applyRecord(record);
      const rewritten = wasActive || live !== run.lanes.speculative.steps.length;
      if (run.active) {
        run.status = "gone"; // the stream was refused though the run goes on: let the poll attach again
        this.run = null;
        return;
      }
      if (play && run.mode === "in_turn" && run.status === "completed" && !reducedMotion.matches) this.play();
      else if (rewritten) this.showAll();
    } catch (error) {
      if (run !== this.run) return;
      if (run.active && error.status === 404) run.status = "gone";
    } finally {
      this.chartDirty = true;
      this.refresh();
    }
  }

  /** A run that ended before this page saw it. */
  async showRecord(runId) {
    const run = new RunModel(runId);
    try {
      run.applyRecord(await api.getRecord(runId));
    } catch {
      return;
    }
    if (this.run?.active || run.active) return;
    this.endPlayback();
    this.run = run;
    this.showAll();
    this.chartDirty = true;
    this.refresh();
  }

  showAll() {
    for (const name of LANES) {
      const pane = this.panes[name];
      pane.clear();
      for (const step of this.run.lanes[name].steps) pane.push(step);
      pane.end();
    }
    this.dirty = true;
    this.loop.request();
  }

  // ---- playback ----

  play() {
    if (!this.run?.scored) return;
    this.playback = new Playback(this.run, this.panes);
    this.playback.rate = Number($('[name="rate"]:checked').value);
    this.refresh();
  }

  skipPlayback() {
    this.playback?.skip();
    this.loop.request();
  }

  endPlayback() {
    this.playback = null;
  }

  // ---- drawing ----

  refresh() {
    this.dirty = true;
    this.loop.request();
  }

  /** One frame. Returns whether another is needed soon. */
  draw(now) {
    const { run } = this;
    if (this.playback) {
      this.playback.tick(now);
      this.dirty = true;
    }
    for (const name of LANES) {
      const pane = this.panes[name];
      const first = pane.dirty && run?.active;
      pane.flush();
      if (first) run.painted(name, performance.now());
    }
    const finishedPlaying = this.playback?.done;
    if (finishedPlaying) this.endPlayback();
    for (const name of LANES) if (this.views[name].starting) this.views[name].showPhases();
    if (this.dirty || run?.active) {
      this.dirty = false;
      this.drawPage();
    }
    for (const name of LANES) this.panes[name].follow();
    if (this.chartDirty && (now - this.chartAt > CHART_EVERY_MS || !run?.active)) {
      this.chartDirty = false;
      this.chartAt = now;
      this.drawCharts();
    }
    return Boolean(run?.active || this.playback || finishedPlaying || LANES.some((n) => this.views[n].starting));
  }

  drawPage() {
    const { run, state } = this;
    const active = Boolean(run?.active);
    for (const name of LANES) {
      const view = this.views[name];
      const lane = run?.lanes[name];
      if (run) view.showFigures(run.figures(name), lane.status === "running" && active);
      else view.clearFigures();
      view.setBusy(active && ["waiting", "running"].includes(lane.status));
      this.drawLaneTexts(view, lane);
    }
    if (!run) this.verdict.idle(state?.ready ? "Run a prompt to measure it." : "");
    else if (active) this.verdict.running(run);
    else this.verdict.finished(run);

    setHidden($("#fair"), !this.canMeasureFair || active);
    setHidden($("#playback"), !(run?.scored && run.mode === "in_turn" && run.status === "completed"));
    setHidden($("#skip"), !this.playback);
    setText($("#replay"), this.playback ? "Again" : "Play back");
    setText($("#playback-clock"), this.playback
      ? `Playing back ${format.seconds(this.playback.positionMs, 1)} of ${format.seconds(this.playback.durationMs, 1)}` : "");

    setHidden($("#run"), active);
    setHidden($("#stop"), !active);
    $("#stop").disabled = Boolean(this.stopping);
    $("#run").disabled = !(state?.ready || this.soloLane) || this.posting || active || this.unreachable;
    setText($("#run"), this.runLabel());
    if (this.locked !== active) {
      this.locked = active;
      this.controls.lock(active);
    }
    document.documentElement.classList.toggle("is-active", active);
    document.documentElement.classList.toggle("is-playing", Boolean(this.playback));
    setHidden($("#badge-lost"), !(this.lost || this.unreachable));
    this.drawStrip();
    this.drawSource();
    this.drawLegend();
  }

  runLabel() {
    if (this.posting) return "Starting";
    if (this.state?.ready || !this.state) return "Run";
    const states = LANES.map((name) => this.state.lanes[name].state);
    if (this.soloLane) return `Run ${TITLES[this.soloLane]} alone`;
    if (states.includes("failed")) return "Lane failed";
    return states.includes("starting") || states.includes("warming") || states.includes("waiting") ? "Starting" : "Not ready";
  }

  drawLaneTexts(view, lane) {
    let status = "";
    let empty = "";
    const { run, playback } = this;
    if (playback) {
      status = playback.laneDone(view.name) ? `Finished in ${format.seconds(playback.laneMs(view.name), 2)}`
        : `Playing back ${format.seconds(playback.laneMs(view.name), 1)}`;
    } else if (lane) {
      const before = run.order.find((n) => run.lanes[n].status === "running");
      status = {
        waiting: run.active && run.order.includes(view.name) ? (before && before !== view.name ? `Waiting: ${TITLES[before]} runs first, alone` : "Waiting") : "Did not run",
        running: run.active ? "Writing" : "Stopped",
        finished: lane.finishReason === "length" ? "Finished: token budget used" : "Finished: end of text",
        cancelled: "Stopped",
        failed: "Failed",
      }[lane.status];
      if (lane.note) status += `. ${lane.note}`;
      if (lane.status === "waiting") empty = status;
    } else {
      status = view.stateWord;
      if (view.lane?.state === "ready") empty = "Ready";
    }
    setText(view.status, status);
    view.article.classList.toggle("is-done", Boolean(playback?.laneDone(view.name)) || lane?.status === "finished");
    setHidden(view.copy, !lane || lane.text === "");
    setHidden(view.empty, empty === "" || view.starting);
    setText(view.empty, empty);
  }

  drawStrip() {
    const request = this.run?.request;
    const prompt = promptOf(request);
    setHidden($("#request-strip"), !request);
    $("#request-strip").classList.toggle("differs", Boolean(request) && prompt !== this.controls.prompt);
    setText($("[data-strip-prompt]"), prompt.length > 600 ? `${prompt.slice(0, 600)}…` : prompt);
    setText($("[data-strip-settings]"), settingsOf(request));
  }

  drawSource() {
    const source = this.run?.source ?? this.state?.source ?? "live";
    const scripted = source === "scripted" || this.state?.source === "scripted";
    const word = scripted ? "SCRIPTED" : source === "replay" ? "REPLAY" : "";
    setHidden($("#watermark"), word === "");
    setHidden($("#badge-source"), word === "");
    if (word) {
      for (const span of $("#watermark").children) setText(span, word);
      setText($("#badge-source"), scripted ? "SCRIPTED, no model" : "REPLAY of a recording");
    }
    const standIn = Boolean(this.run?.pair?.stand_in ?? this.state?.pair.stand_in);
    for (const name of LANES) setHidden(this.views[name].standIn, !standIn);
  }

  drawLegend() {
    const steps = this.run?.lanes.speculative.steps ?? [];
    const whole = steps.length > 0 && !steps.some((s) => Array.isArray(s.pieces));
    setText($("[data-legend-draft]"), whole ? "step with accepted drafts (+count)" : "accepted draft tokens");
    $("[data-legend-draft]").className = whole ? "s" : "d";
    setHidden($("#record"), !this.run || this.run.active);
    if (this.run) $("#record").href = `/api/runs/${encodeURIComponent(this.run.runId)}`;
  }

  drawCharts() {
    const { run } = this;
    if (run) this.rateChart.update(run);
    const values = run?.figures("speculative").acceptance_by_position ?? null;
    this.acceptance.update(values, run && !run.active ? "— nothing was drafted" : "—");
    this.memory.update(run?.active ? run.memory ?? this.state?.memory : this.state?.memory ?? run?.memory);
    const tax = run?.comparison?.memory_tax ?? null;
    setHidden($("#memory-tax"), !tax);
    if (tax) {
      setText($("[data-tax]"), format.signedBytes(tax.total_bytes));
      const split = [["draft weights", tax.draft_weights_bytes], ["draft KV", tax.draft_kv_bytes], ["rest", tax.rest_bytes]];
      if (tax.lost_kv_tokens) split.push(["KV tokens lost", tax.lost_kv_tokens]);
      setText($("[data-tax-split]"), split
        .map(([label, v]) => `${label} ${label === "KV tokens lost" ? format.count(v) : format.bytes(v)}`).join(", "));
    }
  }

  /** Why a figure shows "—", where that is known. */
  reasonFor(term, lane) {
    const { run } = this;
    if (!run) return "Nothing has run yet.";
    if (term === "decode_speedup" || term === "step_cost_ratio") {
      if (run.active) return "";
      if (term === "step_cost_ratio" || run.comparison?.decode_speedup !== undefined) {
        return run.contended ? "Both lanes shared the device in this run: no cost per step, and not the fair figure." : "";
      }
      return "";
    }
    if (!lane || run.figures(lane)[term] !== null) return "";
    if (term === "acceptance_rate") return lane === "baseline" ? "This lane drafts nothing." : "Nothing has been drafted yet.";
    if (term === "ttft_browser_ms") return "This page did not see the run from its start.";
    return "Not measured yet.";
  }

  announce(text) {
    setText($("#announce"), text);
  }

  notify(text) {
    setText($("#notice p"), text);
    setHidden($("#notice"), false);
  }

  async copy(button) {
    const text = this.run?.lanes[button.dataset.copy].text ?? "";
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // No clipboard on plain http from another host: select and copy the old way.
      const area = document.createElement("textarea");
      area.value = text;
      area.className = "visually-hidden";
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    setText(button, done ? "Copied" : "Could not copy");
    setTimeout(() => setText(button, "Copy text"), 1500);
  }

  // ---- the server's state ----

  async poll() {
    clearTimeout(this.timer);
    if (this.polling) return;
    this.polling = true;
    try {
      this.takeState(await api.getState());
      this.unreachable = false;
    } catch {
      this.unreachable = true;
    } finally {
      this.polling = false;
    }
    this.refresh();
    const wait = this.state?.ready && !this.unreachable ? POLL_IDLE_MS : POLL_STARTING_MS;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (document.hidden ? this.sleep() : this.poll()), wait);
  }

  // A hidden tab asks seldom; it asks at once when it shows again.
  sleep() {
    this.timer = setTimeout(() => this.poll(), 10 * POLL_IDLE_MS);
  }

  takeState(state) {
    this.state = state;
    for (const name of LANES) this.views[name].showState(state.lanes[name], this.run?.lanes[name].error?.message);
    const differences = state.fairness?.rows?.filter((r) => r.differs).length ?? 0;
    const known = (state.fairness?.rows?.length ?? 0) > 0;
    setText($("#fairness"), !known ? "Settings" : differences === 0 ? "Equal settings"
      : `${differences} ${differences === 1 ? "setting differs" : "settings differ"}`);
    $("#fairness").classList.toggle("warn", known && differences > 0);
    setText($("[data-device]"), state.device.name);
    this.showPair(state.pair);
    this.chartDirty = true;
    if (this.posting) return;
    if (this.run?.active && !this.stream) this.loadRecord(this.run); // its stream was refused: what became of it?
    const active = state.active_run;
    if (active && active.run_id !== this.run?.runId) this.attach(active.run_id, active.events_url);
    else if (!active && state.last_run && !this.run?.active && state.last_run.run_id !== this.run?.runId) {
      this.showRecord(state.last_run.run_id);
    }
  }

  /** The pair as the header and the speculative pane name it; it changes when the method is switched. */
  showPair(pair) {
    const names = JSON.parse(document.body.dataset.methodNames);
    const how = ({ method, num_speculative_tokens: k }) => `${names[method] ?? method}, ${k} drafted a step`;
    setText($(".pair-title"), pair.title);
    setText(this.views.speculative.how, how(this.run?.pair ?? pair)); // a run keeps the method it ran with
    if ($("#open-method")) {
      setText($("#open-method"), how(pair));
      $("#open-method").disabled = Boolean(this.run?.active);
    }
  }

  async checkStream() {
    if (this.run?.active) return;
    this.check = new AbortController();
    const buffered = await api.streamIsBuffered(this.check.signal);
    if (buffered) {
      this.notify("Your proxy buffers streams: text will arrive in bursts. Open this page without the proxy, or turn its buffering off.");
    }
  }

  async boot() {
    await this.poll();
    await this.checkStream();
  }
}

const page = new Page();
window.specduel = Object.freeze({ stats });
page.boot();
