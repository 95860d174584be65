// The middle of the page: the speed-up, its identity, and whether the outputs are the same.

import * as format from "./format.js";
import { TITLES } from "./run.js";
import { setHidden, setText } from "./lanes.js";

const MOSTLY_PREFILL = 0.5;

export class Verdict {
  constructor(root) {
    const by = (id) => root.getElementById(id);
    this.speedup = by("speedup");
    this.word = by("speedup-word");
    this.contended = by("contended");
    this.identity = by("identity");
    this.parts = Object.fromEntries(
      [...this.identity.querySelectorAll("[data-identity]")].map((node) => [node.dataset.identity, node]),
    );
    this.cause = by("cause");
    this.note = by("verdict-note");
    this.check = by("output-check");
    this.checkVerdict = by("output-verdict");
    this.checkDetail = by("output-detail");
  }

  #figure(value, tone, word) {
    setText(this.speedup, format.times(value));
    this.speedup.dataset.tone = tone;
    setText(this.word, word);
  }

  idle(note) {
    this.#figure(null, "none", "");
    for (const node of [this.contended, this.cause, this.check]) setHidden(node, true);
    this.#identity(null, null, null);
    setText(this.note, note);
  }

  /** The arithmetic on the screen; factors that aren't known yet are "—". */
  #identity(yielded, cost, value) {
    setHidden(this.identity, false);
    setText(this.parts.yield, format.decimal(yielded));
    setText(this.parts.cost, `÷ ${cost === null ? format.NONE : `${format.decimal(cost)}×`}`);
    setText(this.parts.speedup, `= ${format.times(value)}`);
    setText(this.parts.word, format.direction(value));
    this.identity.classList.toggle("is-loss", value !== null && value < 1);
    this.identity.classList.toggle("is-open", value === null);
  }

  /** While it runs: the ratio so far when both lanes decode at once, else which lane has the device. */
  running(run) {
    for (const node of [this.cause, this.check]) setHidden(node, true);
    const both = run.mode === "together";
    if (both) setHidden(this.identity, true);
    else this.#identity(run.figures("speculative").tokens_per_step, null, null);
    const rates = [run.figures("baseline").decode_tok_s, run.figures("speculative").decode_tok_s];
    const value = both && rates[0] > 0 && rates[1] !== null ? rates[1] / rates[0] : null;
    this.#figure(value, value === null ? "none" : "live", value === null ? "" : "so far");
    setHidden(this.contended, !(both && run.contended));
    setText(this.contended, "sharing the device");
    const now = run.order.find((name) => run.lanes[name].status === "running");
    const waiting = run.order.find((name) => run.lanes[name].status === "waiting");
    if (both) setText(this.note, now ? "" : "Comparing the outputs");
    else if (now) setText(this.note, `${TITLES[now]} has the device for itself${waiting ? `, then ${TITLES[waiting]}` : ""}`);
    else setText(this.note, "Comparing the outputs");
  }

  finished(run) {
    const c = run.comparison ?? {};
    const value = c.decode_speedup ?? null;
    const word = format.direction(value);
    const fair = !run.contended;
    const tone = value === null ? "none" : !fair ? (value < 1 ? "contended-loss" : "contended") : value < 1 ? "loss" : "gain";
    this.#figure(value, tone, word);
    setHidden(this.contended, fair || value === null);
    setText(this.contended, "sharing the device");

    const yielded = run.lanes.speculative.metrics?.tokens_per_step ?? null;
    const cost = c.step_cost_ratio ?? null;
    const whole = value !== null && yielded !== null && cost !== null;
    if (whole) this.#identity(yielded, cost, value);
    else setHidden(this.identity, true);
    const cause = this.#causeOf(value, yielded, cost, whole);
    setHidden(this.cause, cause === "");
    setText(this.cause, cause);
    setText(this.note, this.#noteOf(run, value));
    this.#showCheck(run, c);
  }

  #causeOf(value, yielded, cost, whole) {
    if (value === null || value >= 1) return "";
    if (whole) return "A step costs more than it yields.";
    if (yielded !== null) return `A step yields ${format.decimal(yielded)} tokens, and costs more than that.`;
    return "";
  }

  #noteOf(run, value) {
    if (run.status === "cancelled") return "Stopped before the end.";
    if (run.status === "gone") return "The server no longer knows this run.";
    if (run.status === "failed") return "No lane finished.";
    if (value === null) {
      const failed = run.order.filter((name) => run.lanes[name].status === "failed");
      if (failed.length > 0) return `${failed.map((n) => TITLES[n]).join(" and ")} failed: no comparison.`;
      return "Too few tokens to measure a decode speed.";
    }
    const share = run.lanes.baseline.metrics?.prefill_share ?? 0;
    const total = run.comparison?.total_speedup ?? null;
    if (share >= MOSTLY_PREFILL && total !== null) {
      return `Prefill included: ${format.times(total)}. ${format.percent(share)} of the baseline's time was prefill.`;
    }
    return "";
  }

  #showCheck(run, c) {
    let verdict = "";
    let detail = "";
    let tone = "";
    if (c.tokens === "identical") {
      verdict = `identical, ${format.count(c.compared_tokens)} tokens`;
      tone = "good";
    } else if (c.tokens === "differs") {
      const d = c.first_difference;
      verdict = d ? `first difference at token ${format.count(d.index + 1)}` : "the outputs differ";
      tone = c.tie ? "" : "warn";
      if (d) {
        const gap = c.tie_gap_nats === null || c.tie_gap_nats === undefined ? ""
          : c.tie ? `, a numerical tie: ${format.decimal(c.tie_gap_nats, 3)} nats apart`
            : `, ${format.decimal(c.tie_gap_nats, 3)} nats apart: not a tie`;
        detail = d.baseline && d.speculative
          ? `${JSON.stringify(d.baseline.text)} against ${JSON.stringify(d.speculative.text)}${gap}`
          : "One output goes on where the other ends.";
      }
    } else if (c.mean_logprob) {
      const { baseline, speculative } = c.mean_logprob;
      if (c.consistent === false) {
        verdict = "not consistent with the target";
        tone = "warn";
      } else if (c.consistent === true) {
        verdict = "consistent with the target";
        tone = "good";
      } else {
        verdict = "sampled, scored by the baseline";
      }
      detail = `Mean log-probability a token: ${format.decimal(baseline)} and ${format.decimal(speculative)} nats`;
    } else if (c.tokens === "not_comparable" && run.status === "completed") {
      verdict = "not compared";
    }
    if (c.consistency_note && c.consistent !== true) detail = c.consistency_note;
    setHidden(this.check, verdict === "");
    setText(this.checkVerdict, verdict);
    setText(this.checkDetail, detail);
    this.checkVerdict.dataset.tone = tone;
  }

  /** One sentence for the status line of a screen reader. */
  summary(run) {
    if (run.status !== "completed") return this.note.textContent;
    const value = run.comparison?.decode_speedup ?? null;
    if (value === null) return `Run finished. ${this.note.textContent}`;
    const rates = run.order.map((n) => `${TITLES[n]} ${format.rate(run.figures(n).rate)} tokens per second`).join(", ");
    const label = run.contended ? ", sharing the device" : "";
    return `Run finished. ${rates}. ${format.times(value)}, ${format.direction(value)}${label}. ${this.checkVerdict.textContent}`;
  }
}
