/* The box under the pointer or keyboard: its ring, its microbatch's path through the ranks, the arrow from its input,
   and words on screen and for screen readers. */

const LONGEST_WAY = 2000; // boxes; a longer path is not highlighted

class Explainer {
  constructor(page) { Object.assign(this, { page, shown: null, walking: false }); }

  hover(chart, { x, y }, event) {
    if (this.walking && event.type === "pointermove" && !event.movementX && !event.movementY) return;
    const found = chart.locate(x, y);
    this.walking = false;
    this.shown = { chart, found, x, y, pointer: { x: event.clientX, y: event.clientY } };
    this.refocus();
  }

  /* Update what is under the pointer, after explanations arrived. */
  relocate() {
    if (this.shown?.pointer) this.shown.found = this.shown.chart.locate(this.shown.x, this.shown.y);
    this.refocus();
  }

  /* What a place on a chart is, or null. */
  explanation(chart, found) {
    if (!found) return null;
    if (found.memory !== undefined) return chart.model.explainMemory(found.memory, Math.max(0, found.time));
    if (found.queue !== undefined) return chart.model.explainQueue(found.queue, Math.max(0, found.time));
    return found.item === null ? null : chart.model.explain(found.rank, found.item);
  }

  leave() {
    this.shown = null;
    this.walking = false;
    this.refocus();
  }

  /* Redraw what belongs to the pointer or the keyboard's box: outline, arrow from its input, hairline, words. */
  refocus() {
    for (const chart of this.page.charts) {
      chart.overlay.replaceChildren();
      chart.plot.classList.remove("lit");
    }
    const tip = byId("tip");
    const said = this.shown && (!this.walking || this.lane()) && this.explanation(this.shown.chart, this.shown.found);
    if (!said) {
      tip.hidden = true;
      return;
    }
    const { chart, found, x, pointer } = this.shown, { ink, accent } = this.page.state.colours;
    if (!this.walking) {
      for (const one of this.page.charts) {
        if (!one.scale) continue;
        svgNode("path", { d: `M${Math.round(x) + 0.5} 0V${one.height}`, stroke: ink, opacity: 0.25 }, one.overlay);
      }
    }
    const lane = this.walking ? this.lane() : null;
    if (found.item !== undefined) this.outline(chart, found, accent, ink);
    else if (lane) this.box(chart, lane.from(this.item), lane.to(this.item), lane, { fill: "none", stroke: ink });
    this.fill(tip, said);
    tip.hidden = false;
    const anchor = pointer ?? this.anchor(chart, lane), { offsetWidth: wide, offsetHeight: high } = tip;
    const left = anchor.x + 16 + wide > window.innerWidth - 8 ? anchor.x - 16 - wide : anchor.x + 16;
    const below = anchor.y + 20 + high <= window.innerHeight - 8;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? anchor.y + 20 : Math.max(8, anchor.y - high - 16)}px`;
  }

  /* Highlight a microbatch's boxes on all ranks, with arrows from each to those that need it. */
  way(chart, microbatch, ink) {
    const { model } = chart, way = model.way(microbatch);
    if (microbatch < 0 || !model.explained || way.length < 2 || way.length > LONGEST_WAY) return;
    chart.plot.classList.add("lit");
    const pen = new SvgSurface(chart.overlay), inside = new Set(way.map(({ rank, index }) => `${rank}/${index}`));
    let d = "";
    for (const { rank, index } of way) {
      const row = model.rows[rank], source = row.input(index);
      chart.box(pen, row, index, chart.y(rank), model.shortest * chart.scale >= 46);
      if (source && inside.has(`${source.rank}/${source.index}`)) d += this.arrow(chart, source, { rank, index });
    }
    pen.path("path", d, { stroke: ink, width: 1.25, name: "way" });
  }

  /* A curve from the end of one box to the start of another, with a head. */
  arrow(chart, source, target) {
    const { rows } = chart.model, end = chart.edge(rows[source.rank].end[source.index]);
    const x = chart.edge(rows[target.rank].start[target.index]), bend = Math.max(6, x - end) / 2;
    const [from, to] = [source.rank, target.rank].map((rank) => chart.y(rank) + chart.rowHeight / 2);
    return `M${end} ${from}C${end + bend} ${from} ${x - bend} ${to} ${x} ${to}m-4 -3l4 3l-4 3`;
  }

  outline(chart, { rank, item }, accent, ink) {
    if (item >= 0) this.way(chart, chart.model.rows[rank].microbatch[item], ink);
    const row = chart.model.rows[rank], place = { top: chart.y(rank), height: chart.rowHeight };
    const source = item >= 0 ? row.input(item) : null;
    if (source) {
      const d = this.arrow(chart, source, { rank, index: item });
      svgNode("path", { d, class: "input", fill: "none", stroke: ink, "stroke-width": 2 }, chart.overlay);
      const end = chart.edge(chart.model.rows[source.rank].end[source.index]);
      svgNode("circle", { cx: end, cy: chart.y(source.rank) + chart.rowHeight / 2, r: 3, fill: ink }, chart.overlay);
    }
    this.box(chart, row.from(item), row.to(item), place, item >= 0 ? { fill: "none", stroke: ink } : { fill: accent, stroke: accent });
  }

  /* A ring around a span of time, wide enough to be seen where spans are narrower than pixels. */
  box(chart, from, to, { top, height }, colours) {
    const x = chart.edge(from), width = Math.max(5, chart.edge(to) - x);
    svgNode("rect", { x: x - 0.5, y: top - 0.5, width, height: height + 1, rx: 3, class: "here", "fill-opacity": 0.07, "stroke-width": 1.75,
      ...colours }, chart.overlay);
  }

  anchor(chart, lane) {
    const { left, top } = chart.plot.getBoundingClientRect();
    return { x: left + Math.max(0, chart.edge(lane.from(this.item))), y: top + lane.top + lane.height - 8 };
  }

  fill(tip, { title, code, facts, why }) {
    tip.replaceChildren(
      element("div", { className: "top" }, element("b", { textContent: title }), element("code", { textContent: code })),
      element("dl", {}, ...facts.map(([name, value]) =>
        element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })))),
      ...(why ? [element("p", { textContent: why })] : []));
  }

  /* The lane that the keyboard is in, or undefined once its strip is hidden. */
  lane() { return this.shown?.chart.lanes().find(({ name }) => name === this.laneName); }

  /* The keyboard enters a timeline at the first box in view, and leaves the pointer alone. */
  enter(chart) {
    const lane = chart.lanes().find(({ length }) => length > 0);
    if (lane) this.walkTo(chart, lane, this.itemIn(lane, chart.from));
  }

  /* The item of a lane at a time, or its last one before. */
  itemIn(lane, time) {
    let at = 0;
    while (at + 1 < lane.length && lane.to(lane.item(at)) <= time) at += 1;
    return lane.item(at);
  }

  walkTo(chart, lane, item) {
    const { view } = this.page.state, from = lane.from(item) + chart.shift, to = lane.to(item) + chart.shift;
    Object.assign(this, { walking: true, laneName: lane.name, item });
    this.shown = { chart, found: lane.found(item), x: 0, y: 0, pointer: null };
    if (from < view.from || to > view.to) {
      const at = to - from > view.width ? from : (from + to) / 2 - view.width / 2;
      view.set(at, at + view.width);
      this.page.moved();
    }
    const y = chart.plot.getBoundingClientRect().top + lane.top;
    if (y < 80 || y + lane.height > window.innerHeight - 16) window.scrollBy(0, y - window.innerHeight / 2);
    this.refocus();
    const said = this.explanation(chart, this.shown.found);
    byId("live").textContent = `${said.title}. ${said.facts.map((fact) => fact.join(" ")).join(", ")}. ${said.why}`;
  }

  walk(key) {
    const { chart } = this.shown, lane = this.lane();
    if (!lane) return;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const next = lane.at(this.item) + (key === "ArrowRight" ? 1 : -1);
      if (next >= 0 && next < lane.length) this.walkTo(chart, lane, lane.item(next));
      return;
    }
    const lanes = chart.lanes(), other = lanes[lanes.findIndex(({ name }) => name === lane.name) + (key === "ArrowDown" ? 1 : -1)];
    if (other?.length) this.walkTo(chart, other, this.itemIn(other, (lane.from(this.item) + lane.to(this.item)) / 2));
  }
}
