// One animation-frame loop for the whole page. Work asks for a frame; hidden tabs get none and lose nothing,
// for the queues are drained in the first frame after the tab shows again.

export class FrameLoop {
  constructor(draw, stats) {
    this.draw = draw;
    this.stats = stats;
    this.pending = false;
  }

  request() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame((now) => {
      this.pending = false;
      this.stats.frames += 1;
      if (this.draw(now)) this.request();
    });
  }
}
