// One lane's text. Steps are queued as they come and written at most once a frame, into text nodes only.
//
// Marks: with `pieces` (one text per token) each accepted draft token is underlined and the target's own
// token is plain. Without them the split of a step's text among its tokens isn't known, so the whole step
// is underlined and followed by the count of accepted drafts in it. Rejected drafts are a count at the step.
// Counts take no room, so that both panes break their lines alike.

import { ThinkSplitter } from "./think.js";

const MAX_NODES = 6000;
const CHUNK_NODES = 120;
const FOLLOW_SLACK_PX = 48;

/** A step as marked fragments, in reading order. */
export function fragmentsOf(step) {
  const out = [];
  const counts = [];
  const pieces = step.pieces;
  if (step.accepted > 0 && Array.isArray(pieces) && pieces.length === step.ids.length) {
    pieces.forEach((text, i) => {
      if (text !== "") out.push({ text, mark: i < step.accepted ? "d" : null });
    });
  } else if (step.text !== "") {
    out.push({ text: step.text, mark: step.accepted > 0 ? "s" : null });
    if (step.accepted > 0) counts.push(`+${step.accepted}`);
  }
  const rejected = step.drafted - step.accepted;
  if (rejected > 0) counts.push(`−${rejected}`);
  if (counts.length > 0) out.push({ text: "", mark: "r", n: counts.join(" ") });
  return out;
}

export class TokenPane {
  /** `onWrite` is told of every batch of DOM writes. */
  constructor(article, onWrite) {
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
    this.chunk = null;
    this.chunkNodes = 0;
    this.lineEnded = false;
    this.grown = false;
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
    this.grown = true;
    this.onWrite();
  }

  /** Keeps the end in view, unless the reader scrolled up. Apart from flush(): it makes the browser lay out. */
  follow() {
    if (!this.grown) return;
    this.grown = false;
    if (this.following) this.out.scrollTop = this.out.scrollHeight;
  }

  #append(segment) {
    if (segment.close) {
      if (this.think && !this.thinkTouched) this.think.details.open = false;
      this.think = null;
      return;
    }
    const parent = segment.think ? this.#thinkBody() : this.#mainChunk();
    if (segment.text !== "") this.lineEnded = segment.text.endsWith("\n");
    if (!segment.mark) {
      const last = parent.lastChild;
      if (last && last.nodeType === Node.TEXT_NODE) last.appendData(segment.text);
      else this.#add(parent, document.createTextNode(segment.text));
      return;
    }
    const span = document.createElement("span");
    span.className = segment.mark;
    if (segment.n !== undefined) span.dataset.n = segment.n;
    if (segment.text !== "") span.append(segment.text);
    this.#add(parent, span);
  }

  #add(parent, node) {
    parent.append(node);
    this.nodes += 1;
    this.chunkNodes += 1;
  }

  // Text goes into blocks that end at a line's end, so that a long output isn't laid out anew every frame.
  #mainChunk() {
    if (!this.chunk || (this.chunkNodes > CHUNK_NODES && this.lineEnded)) {
      this.chunk = document.createElement("div");
      this.main.append(this.chunk);
      this.chunkNodes = 0;
    }
    return this.chunk;
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
      this.chunk = null;
      this.think = { details, body };
      this.thinkTouched = false;
    }
    return this.think.body;
  }

  // Very long outputs: the oldest blocks lose their marks and become plain text, so that layout stays cheap.
  #fold() {
    for (const block of this.main.children) {
      if (this.nodes <= MAX_NODES / 2 || block === this.chunk) return;
      if (block.nodeName === "DETAILS" || block.childNodes.length < 2) continue;
      this.nodes -= block.childNodes.length - 1;
      block.textContent = block.textContent;
    }
  }

  #scrolled() {
    const below = this.out.scrollHeight - this.out.clientHeight - this.out.scrollTop;
    this.following = below < FOLLOW_SLACK_PX;
    this.followButton.hidden = this.following;
  }
}
