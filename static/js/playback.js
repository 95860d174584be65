// Plays a finished run back: both lanes from their own zero, at the recorded pace. It only feeds the panes;
// figures stay as they were measured.

import { LANES } from "./run.js";

export class Playback {
  constructor(run, panes) {
    this.lanes = LANES.map((name) => ({
      name, pane: panes[name], steps: run.lanes[name].steps, next: 0,
      totalMs: run.lanes[name].metrics?.total_ms ?? run.lanes[name].steps.at(-1)?.t_ms ?? 0,
    }));
    this.durationMs = Math.max(0, ...this.lanes.map((l) => l.totalMs));
    this.positionMs = 0;
    this.rate = 1;
    this.last = null;
    for (const { pane } of this.lanes) pane.clear();
  }

  get done() {
    return this.positionMs >= this.durationMs && this.lanes.every((l) => l.next >= l.steps.length);
  }

  /** Where a lane is: its own clock, which stops at its end. */
  laneMs(name) {
    const lane = this.lanes.find((l) => l.name === name);
    return Math.min(this.positionMs, lane.totalMs);
  }

  laneDone(name) {
    const lane = this.lanes.find((l) => l.name === name);
    return lane.next >= lane.steps.length && this.positionMs >= lane.totalMs;
  }

  /** Moves on to the frame at `now` and queues the steps that are due. */
  tick(now) {
    if (this.last !== null) this.positionMs += (now - this.last) * this.rate;
    this.last = now;
    this.#feed();
  }

  skip() {
    this.positionMs = this.durationMs;
    this.#feed(Infinity);
  }

  #feed(until = this.positionMs) {
    for (const lane of this.lanes) {
      while (lane.next < lane.steps.length && lane.steps[lane.next].t_ms <= until) {
        lane.pane.push(lane.steps[lane.next]);
        lane.next += 1;
      }
      if (lane.next >= lane.steps.length) lane.pane.end();
    }
  }
}
