/* Playback: a curtain hides the future, and a line shows the current time. */

const PLAY_SECONDS = 12; // for the visible interval

class Player {
  constructor(page) { Object.assign(this, { page, now: null, playing: false }); }

  toggle() {
    if (this.playing) return this.pause();
    const { view } = this.page.state;
    if (this.now === null || this.now >= view.to * (1 - 1e-9)) this.now = view.from;
    this.playing = true;
    this.before = performance.now();
    this.label();
    return requestAnimationFrame((time) => this.tick(time));
  }

  pause() {
    this.playing = false;
    this.label();
  }

  /* Remove the curtain. */
  stop() {
    this.now = null;
    this.pause();
    this.show();
  }

  seek(time) {
    this.now = time;
    this.show();
  }

  tick(time) {
    if (!this.playing) return;
    const { view } = this.page.state;
    this.now += (Math.max(0, time - this.before) / 1000 / PLAY_SECONDS) * view.width;
    this.before = time;
    if (this.now >= view.to) return this.stop();
    this.show();
    requestAnimationFrame((next) => this.tick(next));
  }

  /* Draw the curtain of every timeline, with the line at the same time on all of them. */
  show() {
    const { colours, view } = this.page.state;
    for (const chart of this.page.charts) {
      chart.curtain.replaceChildren();
      if (this.now === null || !chart.scale) continue;
      const x = Math.round((this.now - view.from) * chart.scale) + 0.5;
      svgNode("rect", { x, y: 0, width: Math.max(0, chart.width - x), height: chart.height, fill: colours.paper, opacity: 0.86 }, chart.curtain);
      svgNode("path", { d: `M${x} 0V${chart.height}`, stroke: colours.accent, "stroke-width": 2 }, chart.curtain);
    }
    if (this.now !== null) byId("range").textContent = `now ${timeText(Number(this.now.toPrecision(3)))}`;
  }

  label() {
    for (const button of document.querySelectorAll("[data-do=play]")) {
      button.textContent = this.playing ? "❚❚" : "▶";
      button.setAttribute("aria-label", this.playing ? "Pause" : "Play");
      button.title = this.playing ? "Pause (p)" : "Play time (p)";
    }
  }
}
