// The events of one run over one EventSource. The browser reconnects by itself and says where it stopped
// (Last-Event-ID); events of another run, and events seen before, are dropped here.

const TYPES = [
  "run", "lane_started", "steps", "lane_stats", "memory", "lane_finished", "lane_failed", "comparison", "end",
];

export class RunStream {
  /**
   * `onEvent(type, data)` gets each event once and in order; `onLost(bool)` when the connection breaks and when
   * it is back; `onGone()` when the server refuses it for good.
   */
  constructor(runId, url, { onEvent, onLost, onGone }) {
    this.runId = runId;
    this.seq = 0;
    this.source = new EventSource(url);
    for (const type of TYPES) {
      this.source.addEventListener(type, (message) => {
        const seq = Number(message.lastEventId);
        if (!this.source || seq <= this.seq) return;
        const data = JSON.parse(message.data);
        if (data.run_id !== this.runId) return;
        this.seq = seq;
        if (type === "end") this.close();
        onEvent(type, data);
      });
    }
    this.source.onopen = () => onLost(false);
    this.source.onerror = () => {
      if (!this.source) return;
      if (this.source.readyState === EventSource.CLOSED) {
        this.close();
        onGone();
      } else {
        onLost(true);
      }
    };
  }

  close() {
    this.source?.close();
    this.source = null;
  }
}
