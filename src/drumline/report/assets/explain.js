/* The box under the pointer or keyboard: its outline, its microbatch's path through the ranks, the arrow from its input,
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
    const said = this.shown && this.explanation(this.shown.chart, this.shown.found);
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
    if (found.item !== undefined) this.outline(chart, found, accent, ink);
    this.fill(tip, said);
    tip.hidden = false;
    const anchor = pointer ?? this.anchor(chart, found), { offsetWidth: wide, offsetHeight: high } = tip;
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
    const row = chart.model.rows[rank], x = chart.edge(row.from(item)), width = Math.max(2, chart.edge(row.to(item)) - x);
    const source = item >= 0 ? row.input(item) : null;
    if (source) {
      const d = this.arrow(chart, source, { rank, index: item });
      svgNode("path", { d, class: "input", fill: "none", stroke: ink, "stroke-width": 2 }, chart.overlay);
      const end = chart.edge(chart.model.rows[source.rank].end[source.index]);
      svgNode("circle", { cx: end, cy: chart.y(source.rank) + chart.rowHeight / 2, r: 3, fill: ink }, chart.overlay);
    }
    svgNode("rect", { x: x - 0.5, y: chart.y(rank) - 0.5, width, height: chart.rowHeight + 1, rx: 3, fill: item >= 0 ? "none" : accent,
      "fill-opacity": 0.07, stroke: item >= 0 ? ink : accent, "stroke-width": 1.75 }, chart.overlay);
  }

  anchor(chart, { rank, item }) {
    const { left, top } = chart.plot.getBoundingClientRect(), row = chart.model.rows[rank];
    return { x: left + Math.max(0, chart.edge(row.from(item))), y: top + chart.y(rank) + chart.rowHeight - 8 };
  }

  fill(tip, { title, code, facts, why }) {
    tip.replaceChildren(
      element("div", { className: "top" }, element("b", { textContent: title }), element("code", { textContent: code })),
      element("dl", {}, ...facts.map(([name, value]) =>
        element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })))),
      ...(why ? [element("p", { textContent: why })] : []));
  }

  /* The keyboard enters a timeline at the first box in view, and leaves the pointer alone. */
  enter(chart) {
    for (let rank = 0; rank < chart.ranks; rank++) {
      const row = chart.model.rows[rank], first = row.items.find((item) => row.to(item) > this.page.state.view.from);
      if (first !== undefined) return this.walkTo(chart, rank, first);
    }
    return undefined;
  }

  walkTo(chart, rank, item) {
    const row = chart.model.rows[rank], { view } = this.page.state, from = row.from(item), to = row.to(item);
    this.walking = true;
    this.shown = { chart, found: { rank, item }, x: 0, y: 0, pointer: null };
    if (from < view.from || to > view.to) {
      const at = to - from > view.width ? from : (from + to) / 2 - view.width / 2;
      view.set(at, at + view.width);
      this.page.moved();
    }
    this.refocus();
    const said = chart.model.explain(rank, item);
    byId("live").textContent = `${said.title}. ${said.facts.map((fact) => fact.join(" ")).join(", ")}. ${said.why}`;
  }

  walk(key) {
    const { chart, found: { rank, item } } = this.shown, row = chart.model.rows[rank];
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const next = row.items[row.items.indexOf(item) + (key === "ArrowRight" ? 1 : -1)];
      if (next !== undefined) this.walkTo(chart, rank, next);
      return;
    }
    const other = rank + (key === "ArrowDown" ? 1 : -1);
    if (other < 0 || other >= chart.ranks) return;
    const there = chart.itemAt(other, (row.from(item) + row.to(item)) / 2) ?? chart.model.rows[other].items[0];
    if (there !== undefined) this.walkTo(chart, other, there);
  }
}
