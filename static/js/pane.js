// One lane's text. Steps are queued as they come and written at most once a frame, into text nodes only.
//
// Marks: with `pieces` (one text per token) each accepted draft token is underlined and the target's own
// token is plain. Without them the split of a step's text among its tokens isn't known, so the whole step
// is underlined and carries the count of accepted drafts in it. Rejected drafts are a count at the step.

import { ThinkSplitter } from "./think.js";

const MAX_NODES = 6000;
const FOLLOW_SLACK_PX = 48;

/** A step as marked fragments, in reading order. */
export function fragmentsOf(step) {
  const out = [];
  const pieces = step.pieces;
  if (step.accepted > 0 && Array.isArray(pieces) && pieces.length === step.ids.length) {
    pieces.forEach((text, i) => {
      if (text !== "") out.push({ text, mark: i < step.accepted ? "d" : null });
    });
  } else if (step.text !== "") {
    out.push({ text: step.text, mark: step.accepted > 0 ? "s" : null, n: step.accepted });
  }
  const rejected = step.drafted - step.accepted;
  if (rejected > 0) out.push({ text: "", mark: "r", n: rejected });
  return out;
}

export class TokenPane {
  /** `onWrite` is told of every batch of DOM writes. */
  constructor(article, onWrite) {
    this.article = article;
    this.out = article.querySelector(".out");
    this.followButton = article.querySelector(".follow");
    this.onWrite = onWrite;
    this.out.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.followButton.addEventListener("click", () => {
      this.following = true;
      this.followButton.hidden = true;
      this.out.scrollTop = this.out.scrollHeight;
    });
    this.clear();
  }

  clear() {
    this.queue = [];
    this.splitter = new ThinkSplitter();
    this.main = document.createElement("div");
    this.main.className = "text";
    this.out.replaceChildren(this.main);
    this.think = null;
    this.thinkTouched = false;
    this.following = true;
    this.followButton.hidden = true;
    this.nodes = 0;
    this.ended = false;
  }

  push(step) {
    this.queue.push(step);
  }

  /** No more steps follow: what was held back as a possible tag is text after all. */
  end() {
    this.ended = true;
  }

  get dirty() {
    return this.queue.length > 0 || (this.ended && this.splitter.held.length > 0);
  }

  /** Writes what is queued. Call it once a frame. */
  flush() {
    if (!this.dirty) return;
    const segments = this.splitter.feed(this.queue.flatMap(fragmentsOf));
    this.queue = [];
    if (this.ended) segments.push(...this.splitter.flush());
    if (segments.length === 0) return;
    for (const segment of segments) this.#append(segment);
    if (this.nodes > MAX_NODES) this.#fold();
    if (this.following) this.out.scrollTop = this.out.scrollHeight;
    this.onWrite();
  }

  #append(segment) {
    if (segment.close) {
      if (this.think && !this.thinkTouched) this.think.details.open = false;
      this.think = null;
      return;
    }
    const parent = segment.think ? this.#thinkBody() : this.main;
    if (!segment.mark) {
      const last = parent.lastChild;
      if (last && last.nodeType === Node.TEXT_NODE) last.appendData(segment.text);
      else this.#add(parent, document.createTextNode(segment.text));
      return;
    }
    const span = document.createElement("span");
    span.className = segment.mark;
    if (segment.mark !== "d") span.dataset.n = String(segment.n);
    if (segment.text !== "") span.append(segment.text);
    this.#add(parent, span);
  }

  #add(parent, node) {
    parent.append(node);
    this.nodes += 1;
  }

  #thinkBody() {
    if (!this.think) {
      const details = document.createElement("details");
      details.className = "think";
      details.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Thinking";
      summary.addEventListener("click", () => {
        this.thinkTouched = true;
      });
      const body = document.createElement("div");
      details.append(summary, body);
      this.main.append(details);
      this.think = { details, body };
      this.thinkTouched = false;
    }
    return this.think.body;
  }

  // Very long outputs: the oldest marked text becomes one plain text node, so that layout stays cheap.
  #fold() {
    const nodes = [...this.main.childNodes];
    let run = [];
    const collapse = () => {
      if (run.length > 1) {
        run[0].replaceWith(document.createTextNode(run.map((n) => n.textContent).join("")));
        for (const n of run.slice(1)) n.remove();
        this.nodes -= run.length - 1;
      }
      run = [];
    };
    for (const node of nodes.slice(0, nodes.length - MAX_NODES / 2)) {
      if (node.nodeName === "DETAILS") collapse();
      else run.push(node);
    }
    collapse();
  }

  #scrolled() {
    const below = this.out.scrollHeight - this.out.clientHeight - this.out.scrollTop;
    this.following = below < FOLLOW_SLACK_PX;
    this.followButton.hidden = this.following;
  }
}
