// Parts of a model's text inside <think>…</think>, told apart on the accumulated text: a tag that is
// split across deltas is held back until it is complete, or turns out to be plain text.

const OPEN = "<think>";
const CLOSE = "</think>";

/** How many characters at the end of `text` could be the beginning of `tag`. */
function heldBack(text, tag) {
  for (let n = Math.min(tag.length - 1, text.length); n > 0; n -= 1) {
    if (tag.startsWith(text.slice(-n))) return n;
  }
  return 0;
}

/**
 * Splits marked fragments `{text, mark}`. A fragment with an empty text is a point (a count of rejected
 * drafts) and keeps its place. Output fragments also carry `think`; a fragment `{close: true}` ends a block.
 */
export class ThinkSplitter {
  constructor() {
    this.inside = false;
    this.held = [];
  }

  feed(fragments) {
    const queue = this.held.concat(fragments);
    this.held = [];
    const text = queue.map((f) => f.text).join("");
    const out = [];
    let at = 0;
    // Moves `length` characters from the queue to `sink`, with the points on the way. Points that stand
    // just behind the last character come along.
    const take = (length, sink) => {
      let left = length;
      while (queue.length > 0 && (left > 0 || queue[0].text === "")) {
        const f = queue[0];
        if (f.text.length <= left) {
          queue.shift();
          left -= f.text.length;
          sink?.push({ ...f, think: this.inside });
        } else {
          sink?.push({ ...f, text: f.text.slice(0, left), think: this.inside });
          queue[0] = { ...f, text: f.text.slice(left) };
          left = 0;
        }
      }
      at += length;
    };
    for (;;) {
      const tag = this.inside ? CLOSE : OPEN;
      const found = text.indexOf(tag, at);
      if (found < 0) {
        take(text.length - at - heldBack(text.slice(at), tag), out);
        this.held = queue;
        return out;
      }
      take(found - at, out);
      const points = [];
      take(tag.length, points);
      if (this.inside) out.push({ text: "", close: true, think: true });
      this.inside = !this.inside;
      out.push(...points.filter((f) => f.text === "").map((f) => ({ ...f, think: this.inside })));
    }
  }

  /** What was held back, once no more text follows. */
  flush() {
    const rest = this.held.map((f) => ({ ...f, think: this.inside }));
    this.held = [];
    return rest;
  }
}
