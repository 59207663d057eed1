/* The page: one view that all timelines share, its controls, and its explanations. */

const STRIPS_UP_TO = 16; // ranks; with more, the strips are tall and stay hidden until requested

class Page {
  constructor() {
    this.state = { view: new View(1), critical: false, memory: false, queues: false, ends: false, longest: 0, lanes: 0, colours: {}, font: "" };
    this.charts = [];
    this.times = { first_draw_ms: 0, painted_ms: 0, last_draw_ms: 0 };
    this.explainer = new Explainer(this);
    this.pointers = new Pointers(this, this.explainer);
    this.player = new Player(this);
    this.boxes = new ScrollBoxes();
    this.controls();
    window.addEventListener("resize", () => { this.scatter(); this.invalidate(); });
    window.addEventListener("scroll", () => this.request(), { passive: true });
    window.addEventListener("hashchange", () => this.unfold());
    window.addEventListener("beforeprint", () => this.drawStale());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    document.addEventListener("keydown", (event) => this.key(event));
  }

  /* Show a document from `scene.document`; may be called again with another. */
  load(data) {
    this.data = data;
    clock.seconds = Boolean(data.seconds);
    this.models = data.timelines.map((one) => new Model(one, data));
    const single = (this.models.length === 1 || Boolean(data.strips)) && this.models[0].rows.length <= STRIPS_UP_TO;
    if (!this.charts.length) Object.assign(this.state, { memory: single, queues: single });
    const lengths = this.models.map((model) => model.makespan * 1.005).sort((a, b) => a - b);
    const usual = 2 * lengths[lengths.length >> 1];
    this.state.longest = Math.max(0, ...this.models.map((model) => model.makespan));
    for (const button of document.querySelectorAll("[data-toggle=ends]")) button.hidden = this.models.length < 2;
    if (this.models.length < 2) this.state.ends = false;
    else if (data.ends !== undefined && !this.charts.some(({ index }) => index)) this.state.ends = data.ends;
    this.state.view = new View(lengths[lengths.length - 1], lengths.findLast((length) => length <= usual));
    byId("title").textContent = data.title;
    document.title = data.title;
    byId("advice").textContent = data.advice;
    byId("advice").hidden = !data.advice;
    this.charts = this.models.map((model, index) => new Chart(model, this.state, index));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.node));
    byId("summary").replaceChildren(summary(this.models));
    this.boxes.listen(byId("summary"));
    byId("tradeoff").hidden = !data.points.length;
    if (data.points.length) document.querySelector(".toolbar").before(byId("overview"));
    else byId("charts").after(byId("overview"));
    for (const chart of this.charts) this.pointers.listen(chart);
    this.explainer.leave();
    this.player.stop();
    this.repaint();
    this.relayout();
    this.frame();
    this.unfold();
  }

  /* Load the explanations of a timeline that arrived without them. */
  explain(why, index = 0) {
    this.models[index].learn(why);
    this.charts[index].layout();
    byId("legend").replaceChildren(...legend(this.models, this.state));
    this.explainer.relocate();
    this.request();
  }

  /* Colours come from the style sheet, so that canvas and SVG both follow the theme. */
  repaint() {
    const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
    const named = (...names) => Object.fromEntries(names.map((name) => [name, value(`--${name}`)]));
    const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const colours = named("paper", "ink", "muted", "rule", "track", "accent", "memory", "queue");
    colours.idle = Object.fromEntries(this.data.causes.map((cause) => [cause, value(`--idle-${cause}`)]));
    const idle = Object.fromEntries(Object.entries(colours.idle).map(([cause, hex]) => [cause, rgb(hex)]));
    colours.rgb = { idle, track: rgb(colours.track), ops: this.data.ops.map((op) => SHADES.map((name) => rgb(op[name]))), rims: this.data.ops.map(({ edge }) => SHADES.map(() => rgb(edge))) };
    this.state.colours = colours;
    this.state.font = getComputedStyle(document.body).fontFamily;
    byId("legend").replaceChildren(...legend(this.models, this.state));
    this.scatter();
    this.invalidate();
  }

  /* A link to something folded opens it. */
  unfold() {
    const target = location.hash && byId(location.hash.slice(1));
    if (target?.tagName === "DETAILS") target.open = true;
  }

  scatter() {
    const host = byId("scatter");
    if (this.data?.points.length) host.replaceChildren(scatter(this.data.points, this.state.colours, Math.min(820, host.clientWidth)));
  }

  relayout() {
    for (const button of document.querySelectorAll("[data-toggle]")) {
      button.setAttribute("aria-pressed", String(this.state[button.dataset.toggle]));
    }
    for (const chart of this.charts) chart.layout();
    this.invalidate();
  }

  toggle(name) {
    this.state[name] = !this.state[name];
    this.relayout();
  }

  invalidate() {
    for (const chart of this.charts) chart.stale = true;
    this.request();
  }

  request() {
    this.pending ??= requestAnimationFrame(() => { this.pending = null; this.frame(); });
  }

  /* After the view moved: draw quickly first, and fully once it rests. */
  moved() {
    this.moving = true;
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { this.moving = false; this.invalidate(); }, 160);
    this.invalidate();
  }

  /* Draw the timelines near the window; draw the others when they come near, or when there is time. */
  frame() {
    const start = performance.now(), low = -window.innerHeight, high = 2 * window.innerHeight;
    for (const chart of this.charts) {
      if (!chart.stale) continue;
      const { top, bottom } = chart.node.getBoundingClientRect();
      if (bottom > low && top < high) chart.draw(this.moving);
    }
    this.scrubber();
    this.explainer.refocus();
    this.player.show();
    this.times.last_draw_ms = performance.now() - start;
    document.querySelector(".toolbar").classList.toggle("stuck", window.scrollY > 60);
    if (!this.moving && this.charts.some((chart) => chart.stale)) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.drawStale(), 300);
    }
  }

  drawStale() {
    for (const chart of this.charts) if (chart.stale && !this.moving) chart.draw();
  }

  scrubber() {
    const { view } = this.state, [thumb] = byId("scrubber").children;
    byId("scrubber").classList.toggle("whole", view.width >= view.extent * (1 - 1e-9));
    thumb.style.left = `${(100 * view.from) / view.extent}%`;
    thumb.style.width = `${(100 * view.width) / view.extent}%`;
    const digits = Math.max(0, Math.min(9, 2 - Math.floor(Math.log10(view.width))));
    const shown = (time) => timeText(Number(Math.min(time, view.extent / 1.005).toFixed(digits)));
    byId("range").textContent = `${shown(view.from)} – ${shown(view.to)}`;
  }

  controls() {
    const act = {
      in: () => this.zoom(1.6), out: () => this.zoom(1 / 1.6), reset: () => this.reset(), theme: () => this.theme(), play: () => this.player.toggle(),
    };
    for (const button of document.querySelectorAll("[data-do]")) button.onclick = () => act[button.dataset.do]();
    for (const button of document.querySelectorAll("[data-toggle]")) button.onclick = () => this.toggle(button.dataset.toggle);
    const bar = byId("scrubber"), follow = (event) => {
      const { left, width } = bar.getBoundingClientRect(), current = this.state.view;
      current.pan(((event.clientX - left) / width) * current.extent - (current.from + current.to) / 2);
      this.moved();
    };
    bar.addEventListener("pointerdown", (event) => { bar.setPointerCapture(event.pointerId); follow(event); });
    bar.addEventListener("pointermove", (event) => { if (bar.hasPointerCapture(event.pointerId)) follow(event); });
  }

  theme() {
    const root = document.documentElement, now = root.dataset.theme
      ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    this.repaint();
  }

  zoom(factor, at) { this.state.view.zoom(factor, at); this.moved(); }

  pan(share) { this.state.view.pan(share * this.state.view.width); this.moved(); }

  reset() { this.state.view.set(0, this.state.view.extent); this.moved(); }

  key(event) {
    const typing = event.target.closest?.("input, select, textarea, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event, arrow = key.startsWith("Arrow");
    const chart = this.charts.find(({ plot }) => plot === document.activeElement);
    const acts = {
      "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), "0": () => this.reset(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), Escape: () => this.explainer.leave(),
      c: () => this.toggle("critical"), m: () => this.toggle("memory"), q: () => this.toggle("queues"), t: () => this.theme(), p: () => this.player.toggle(), e: () => this.models.length > 1 && this.toggle("ends"),
      ...(chart && !this.explainer.walking ? { Enter: () => this.explainer.enter(chart) } : {}),
    };
    if (this.explainer.walking && arrow && !event.shiftKey) {
      event.preventDefault();
      this.explainer.walk(key);
    } else if (acts[key]) {
      event.preventDefault();
      acts[key]();
    }
  }

  /* For tests and the console. */
  api() {
    const chartAt = (index) => this.charts[index];
    const sum = (name) => this.charts.reduce((total, chart) => total + chart[name], 0);
    return {
      stats: () => ({
        timelines: this.charts.length, boxes: this.models.reduce((total, model) => total + model.raw.boxes, 0),
        drawn: sum("drawn"), critical: sum("criticalDrawn"), modes: this.charts.map((chart) => chart.mode),
        view: { from: this.state.view.from, to: this.state.view.to, extent: this.state.view.extent }, ...this.times,
      }),
      boxAt: (rank, time, index = 0) => {
        const { model } = chartAt(index), box = model.rows[rank].boxAt(time);
        return box < 0 ? null : model.code(model.rows[rank], box);
      },
      explain: (rank, time, index = 0) => {
        const chart = chartAt(index), item = chart.itemAt(rank, time);
        return item === null ? null : chart.model.explain(rank, item);
      },
      place: (rank, time, index = 0) => {
        const chart = chartAt(index), { left, top } = chart.plot.getBoundingClientRect();
        return { x: left + chart.x(time), y: top + chart.y(rank) + chart.rowHeight / 2 };
      },
      show: (from, to) => { this.state.view.set(from, to); this.moved(); },
      way: (microbatch, index = 0) => chartAt(index).model.way(microbatch).map(({ rank, index: at }) => {
        const { model } = chartAt(index);
        return model.code(model.rows[rank], at);
      }),
      playAt: (time) => this.player.seek(time),
      load: (data) => this.load(data),
      learn: (why, index = 0) => this.explain(why, index),
    };
  }
}

const began = performance.now(), page = new Page();
new Marks();
window.drumline = page.api();
page.load(JSON.parse(byId("data").textContent));
page.times.first_draw_ms = performance.now() - began;
document.documentElement.dataset.firstDrawMs = page.times.first_draw_ms.toFixed(1);
requestAnimationFrame(() => setTimeout(() => {
  page.times.painted_ms = performance.now();
  document.documentElement.dataset.paintedMs = page.times.painted_ms.toFixed(1);
}));
