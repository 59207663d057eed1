/* The interval that all timelines show. */

class View {
  /* `home` is what a new page shows: everything, unless a few timelines are far longer than the others. */
  constructor(extent, home = extent) {
    this.extent = extent || 1;
    this.home = home || 1;
    this.set(0, this.home);
  }

  set(from, to) {
    const width = Math.min(this.extent, Math.max(to - from, this.extent * 1e-6));
    this.from = Math.max(0, Math.min(this.extent - width, from));
    this.to = this.from + width;
  }

  get width() { return this.to - this.from; }

  get wide() { return this.width >= this.home * (1 - 1e-9); }

  pan(seconds) { this.set(this.from + seconds, this.to + seconds); }

  zoom(factor, at = (this.from + this.to) / 2) {
    const width = Math.min(this.extent, this.width / factor), share = (at - this.from) / this.width;
    this.set(at - share * width, at - share * width + width);
  }
}
