/* One timeline on the page: its rows, axis and strips, drawn for a view on the surface that suits. */

const SVG_LIMIT = 10000; // boxes in view; above, canvas
const MOVING_LIMIT = 1500; // the same while the view moves
const TINT = 0.12, NARROW = 0.8; // opacity of idle time under its lines, and where it is too narrow for lines
const AXIS = 26, STRIP_HEAD = 26;

/* Times at round steps of 1, 2 or 5 in a view, at most one every 70 pixels. */
function tickTimes(view, width) {
  const most = Math.max(2, width / 70), raw = (view.to - view.from) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * (1 - 1e-9));
  const times = [];
  for (let at = Math.ceil(view.from / step - 1e-9); at * step <= view.to * (1 + 1e-9); at++) times.push(at * step);
  return times;
}

class Chart {
  constructor(model, state, index) {
    Object.assign(this, { model, state, index, drawn: 0, criticalDrawn: 0, mode: "", stale: true });
    const { raw } = model, count = model.rows.length;
    [this.rowHeight, this.gap] =
      [[8, 30, 6], [16, 24, 4], [32, 18, 3], [64, 12, 2], [160, 7, 1]].find(([most]) => count <= most)?.slice(1) ?? [4, 1];
    this.memoryHeight = Math.max(3, Math.min(20, Math.floor(200 / count)));
    const facts = `${count} ranks, ${raw.stages} stages, ${raw.microbatches} microbatches${model.slices > 1 ? ` in ${model.slices} slices` : ""}, ${raw.placement} placement`;
    const figure = (name, value) => element("span", {}, name, element("b", { textContent: value }));
    this.note = element("span", { className: "facts" });
    this.left = element("div", { className: "gutter left" });
    this.right = element("div", { className: "gutter right" });
    this.plot = element("div", {
      className: "plot", tabIndex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": `${model.name}: ${facts}. Arrow keys go from box to box, and below the ranks to memory and queues.`,
    });
    this.node = element("section", { className: "chart", id: `timeline-${index}` },
      element("div", { className: "heading" },
        element("h2", {}, ...sign(raw.run), model.name), element("span", { className: "facts", textContent: facts }), this.note,
        element("span", { className: "figures" }, figure("makespan", timeText(raw.makespan)),
          figure(raw.bubble_of ?? "bubble", percent(raw.bubble)), figure("peak", model.amount(model.peak)))),
      element("div", { className: "body" }, this.left, this.plot, this.right));
    this.overlay = svgNode("svg", { class: "overlay" }, this.plot);
    this.curtain = svgNode("svg", { class: "overlay curtain" }, this.plot);
  }

  get ranks() { return this.model.rows.length; }

  y(rank) { return rank * (this.rowHeight + this.gap); }

  /* Timelines begin together, or end together: then the shorter ones begin later. */
  get shift() { return this.state.ends ? this.state.longest - this.model.makespan : 0; }

  get from() { return this.state.view.from - this.shift; }

  get to() { return this.state.view.to - this.shift; }

  x(time) { return (time - this.from) * this.scale; }

  time(x) { return this.from + x / this.scale; }

  /* Lay out what depends on the toggles: heights and the labels left and right. */
  layout() {
    const { state, model } = this, { queues } = model;
    if (model.explained) state.lanes = queues.length;
    this.queueHeight = Math.max(3, Math.min(14, Math.floor(160 / Math.max(1, state.lanes))));
    this.deepest = queues.reduce((most, queue) => queue.value.reduce((a, b) => Math.max(a, b), most), 1);
    this.rowsBottom = this.y(this.ranks) - this.gap;
    this.memoryTop = this.rowsBottom + AXIS + STRIP_HEAD;
    const memoryBottom = state.memory ? this.memoryTop + this.ranks * (this.memoryHeight + 2) : this.rowsBottom + AXIS;
    this.queueTop = memoryBottom + STRIP_HEAD;
    // Until its queues are known, a timeline keeps as much room for them as the last one needed.
    this.height = state.queues ? this.queueTop + state.lanes * (this.queueHeight + 2) : memoryBottom;
    this.plot.style.height = `${this.height}px`;
    this.left.replaceChildren();
    this.right.replaceChildren();
    for (const name of this.plot.querySelectorAll(".strip-name")) name.remove();
    this.labels();
    this.stale = true;
  }

  labels() {
    const put = (gutter, className, top, ...words) => {
      const node = element("span", { className }, ...words);
      node.style.top = `${top}px`;
      gutter.append(node);
    };
    const head = (top, words) => {
      const node = element("div", { className: "strip-name", textContent: words });
      node.style.top = `${top - 20}px`;
      this.plot.append(node);
    };
    const { state, model, rowHeight } = this, every = Math.ceil(13 / (rowHeight + this.gap));
    for (const { rank, raw } of model.rows) {
      if (rank % every) continue;
      const top = this.y(rank) + rowHeight / 2 - 8;
      put(this.left, "rank", top, element("span", { className: "word", textContent: "rank " }), String(rank));
      put(this.right, "idle", top, percent(raw.idle_share));
      put(this.right, "peak", top, model.bytesKnown ? bytes(raw.peak_bytes) : String(raw.peak_activations));
    }
    put(this.right, "idle head", this.rowsBottom + 4, "idle");
    put(this.right, "peak head", this.rowsBottom + 4, "peak");
    if (state.memory) {
      head(this.memoryTop, `memory: ${model.bytesKnown ? "bytes" : "pairs"} held, up to ${model.amount(model.peak)}`);
      if (this.memoryHeight >= 9) {
        for (let rank = 0; rank < this.ranks; rank++) {
          put(this.left, "small", this.memoryTop + rank * (this.memoryHeight + 2) + this.memoryHeight / 2 - 8, String(rank));
        }
      }
    }
    if (state.queues) {
      const { queues } = model, none = model.explained ? "no message ever waits" : "messages waiting";
      head(this.queueTop, queues.length ? `messages waiting, up to ${this.deepest}` : none);
      if (this.queueHeight >= 9) {
        queues.forEach(({ source, target }, at) => {
          put(this.left, "small", this.queueTop + at * (this.queueHeight + 2) + this.queueHeight / 2 - 8, `${source}→${target}`);
        });
      }
    }
  }

  /* Where a point of the plot is: {rank, time, item} on the rows, {memory, time} or {queue, time} on the strips. */
  locate(x, y) {
    const time = this.time(x), { state } = this;
    const lane = (top, height, count) => {
      const at = Math.floor((y - top) / (height + 2));
      return y >= top && at < count ? at : -1;
    };
    if (y < this.rowsBottom) {
      const rank = Math.max(0, Math.min(this.ranks - 1, Math.floor(y / (this.rowHeight + this.gap))));
      return { rank, time, item: this.itemAt(rank, time) };
    }
    const memory = state.memory && this.model.explained ? lane(this.memoryTop, this.memoryHeight, this.ranks) : -1;
    if (memory >= 0) return { memory, time };
    const queue = state.queues ? lane(this.queueTop, this.queueHeight, this.model.queues.length) : -1;
    return queue >= 0 ? { queue, time } : null;
  }

  itemAt(rank, time) {
    const row = this.model.rows[rank], box = row.boxAt(time, 3 / this.scale);
    if (box >= 0) return box;
    const idle = row.idleAt(time);
    return idle >= 0 ? -1 - idle : null;
  }

  /* What the keyboard walks, from top to bottom: rows of boxes and bubbles, then the steps of the strips that are shown. */
  lanes() {
    const { model, state } = this;
    const strip = (name, { time }, at, top, height) => ({
      name: `${name} ${at}`, top: top + at * (height + 2), height, length: time.length, item: (i) => i, at: (item) => item,
      from: (i) => time[i], to: (i) => time[i + 1] ?? model.makespan, found: (i) => ({ [name]: at, time: time[i] }),
    });
    return [
      ...model.rows.map((row) => ({
        name: `rank ${row.rank}`, top: this.y(row.rank), height: this.rowHeight, get length() { return row.items.length; },
        item: (i) => row.items[i], at: (item) => row.items.indexOf(item),
        from: (item) => row.from(item), to: (item) => row.to(item), found: (item) => ({ rank: row.rank, item }),
      })),
      ...(state.memory && model.explained
        ? model.rows.map(({ memory }, at) => strip("memory", memory, at, this.memoryTop, this.memoryHeight)) : []),
      ...(state.queues ? model.queues.map((queue, at) => strip("queue", queue, at, this.queueTop, this.queueHeight)) : []),
    ];
  }

  /* The indices of a row's boxes in view, as [first, one past the last]. */
  range(row) {
    return [Math.max(0, after(row.end, this.from) - 1), after(row.start, this.to)];
  }

  draw(moving = false) {
    const { state, model } = this, { view, colours } = state;
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    this.scale = this.width / view.width;
    this.ratio = window.devicePixelRatio || 1;
    const ranges = model.rows.map((row) => this.range(row));
    this.drawn = ranges.reduce((sum, [first, last]) => sum + last - first, 0);
    const critical = (row, [first, last]) => row.critical.subarray(first, last).reduce((sum, one) => sum + one, 0);
    this.criticalDrawn = state.critical ? model.rows.reduce((sum, row, at) => sum + critical(row, ranges[at]), 0) : 0;
    this.onSurface(this.drawn > (moving ? MOVING_LIMIT : SVG_LIMIT) ? "canvas" : "svg");
    const pen = this.surface;
    pen.begin(this.width, this.height);
    const until = this.edge(model.makespan), from = this.edge(0);
    for (let rank = 0; rank < this.ranks; rank++) {
      pen.rect("track", from, this.y(rank), until - from, this.rowHeight, colours.track, { radius: 2 });
    }
    this.axis(pen, colours);
    const dense = [];
    this.hatches = {};
    this.rims = {};
    model.rows.forEach((row, rank) => {
      const [first, last] = ranges[rank];
      if (this.mode === "canvas" && last - first > 0.7 * this.width * this.ratio) {
        const { ops, rims } = colours.rgb;
        dense.push({ rank, pixels: this.pixels(row, first, last, ops), rim: this.pixels(row, first, last, rims) });
      } else this.row(pen, row, first, last);
    });
    for (const [cause, d] of Object.entries(this.hatches)) {
      if (d) pen.path("hatch", d, { stroke: colours.idle[cause], name: `hatch ${cause}` });
    }
    for (const [op, d] of Object.entries(this.rims)) pen.path("edge", d, { stroke: model.ops[op].edge, name: "rim" });
    this.note.textContent = dense.length ? "boxes are narrower than pixels, so colours are averages: zoom in" : "";
    if (dense.length) {
      pen.lines(this.width, dense, (rank) => this.y(rank), this.rowHeight);
      const rims = dense.map(({ rank, rim }) => ({ rank, pixels: rim }));
      for (const down of [0, this.rowHeight - 1]) pen.lines(this.width, rims, (rank) => this.y(rank) + down, 1);
    }
    this.exchanges(pen);
    if (state.memory && model.explained) this.memory(pen, colours);
    if (state.queues) this.queues(pen, colours);
    if (state.critical) this.path(pen, colours);
    pen.end();
    this.stale = false;
  }

  onSurface(mode) {
    if (this.mode === mode) return;
    this.surface?.remove();
    this.mode = mode;
    this.plot.dataset.mode = mode;
    this.surface = mode === "svg" ? new SvgSurface(this.plot) : new CanvasSurface(this.plot, this.state.font);
    this.plot.append(this.overlay, this.curtain);
  }

  /* A time's place, kept near the plot and on a whole device pixel so that edges stay crisp. */
  edge(time) {
    const x = Math.max(-8, Math.min(this.width + 8, this.x(time)));
    return Math.round(x * this.ratio) / this.ratio;
  }

  axis(pen, colours) {
    let d = "";
    for (const time of tickTimes(this, this.width)) {
      if (time < 0 && this.shift) continue; // before a timeline that begins later
      const x = this.edge(time) + 0.5;
      d += `M${x} 0V${this.height}`;
      const anchor = x < 14 ? "start" : x > this.width - 14 ? "end" : "middle";
      pen.text("cause", Math.max(0, Math.min(this.width, x)), this.rowsBottom + 17, timeText(time), colours.muted, { anchor });
    }
    if (d) pen.path("grid", d, { stroke: colours.rule });
  }

  row(pen, row, first, last) {
    const { state, model, rowHeight } = this, { colours } = state, top = this.y(row.rank);
    for (let i = after(row.idleEnd, this.from); i < row.idleEnd.length && row.idleStart[i] < this.to; i++) {
      const x = this.edge(row.idleStart[i]), width = this.edge(row.idleEnd[i]) - x;
      const cause = model.causes[row.causes[i]], tint = colours.idle[cause];
      if (width > 0) {
        pen.rect("idle", x, top, width, rowHeight, tint, { name: `idle ${cause}`, alpha: width < APART ? NARROW : TINT });
        this.hatches[cause] = (this.hatches[cause] ?? "") + hatched(x, top, width, rowHeight, model.hatches[cause]);
      }
      const middle = Math.max(0, x) / 2 + Math.min(this.width, x + width) / 2;
      const seen = Math.min(this.width, x + width) - Math.max(0, x);
      if (rowHeight >= 14 && seen > 7 * cause.length + 10) {
        pen.text("cause", middle, top + rowHeight / 2 + 4, cause, colours.ink, { size: 11, halo: colours.track });
      }
    }
    const full = model.shortest * this.scale >= 46, marks = [];
    for (let i = first; i < last; i++) {
      if (row.end[i] > row.start[i]) this.box(pen, row, i, top, full); else marks.push(i);
    }
    for (const i of marks) {
      const fill = model.ops[row.op[i]].even, alpha = this.alpha(row, i), x = this.edge(row.start[i]);
      pen.rect("mark", x - 1, top - 1, 2, rowHeight + 2, fill, { alpha, name: this.named(row, i) });
      if (alpha === 1) this.rim(row.op[i], `M${x - 1.5} ${top - 1}v${rowHeight + 2}m3 0v${-rowHeight - 2}`);
    }
  }

  /* Lines in an op's dark shade, drawn as one path: on light paper they make its narrow boxes stand out. */
  rim(op, d) { this.rims[op] = (this.rims[op] ?? "") + d; }

  /* Boxes off the critical path fade, once it is known. */
  alpha(row, i) { return this.state.critical && this.model.explained && !row.critical[i] ? 0.22 : 1; }

  named(row, i) { return this.state.critical && row.critical[i] ? "box critical" : "box"; }

  box(pen, row, i, top, full) {
    const { model, rowHeight } = this, x = this.edge(row.start[i]);
    let width = this.edge(row.end[i]) - x;
    width = width > 4 ? width - 1 : Math.max(width, 0.5 / this.ratio);
    const room = (row.end[i] - row.start[i]) * this.scale - 1; // not rounded, so that equal boxes have equal labels
    const second = row.second(i), alpha = this.alpha(row, i), name = this.named(row, i);
    const height = second ? rowHeight / 2 : rowHeight, radius = width > 6 && rowHeight > 8 ? 2.5 : 0;
    const options = { radius, alpha, name, room };
    this.part(pen, row.stage[i], row.op[i], row.microbatch[i], row.local[i], x, top, width, height, options, full);
    if (second) {
      this.part(pen, second.stage, second.op, second.microbatch, second.local, x, top + height, width, height,
        { ...options, name: "half" }, full);
    }
  }

  part(pen, stage, op, microbatch, local, x, y, width, height, options, full) {
    const { room, alpha } = options, shades = this.model.ops[op], band = Math.min(local, 3) * (height > 20 ? 2.5 : 1.5);
    const fill = shades[SHADES[this.model.shade(microbatch)]];
    if (width > 4 && height > 4) {
      pen.rect("box", x + 0.5, y + 0.5, width - 1, height - 1, fill, { ...options, stroke: shades.edge });
    } else {
      pen.rect("box", x, y, width, height, fill, options);
      if (alpha === 1 && height > 4) this.rim(op, `M${x} ${y + 0.5}h${width}m0 ${height - 1}h${-width}`);
    }
    if (band && height >= 6) pen.rect("edge", x, y + height - band, width, band, shades.edge, { alpha });
    if (microbatch < 0 || height < 10 || width < 7) return;
    const size = height > 16 ? 11 : 9, unit = this.model.unit(microbatch), label = full ? `${stage}${shades.text}${unit}` : unit;
    if (label.length * size * 0.62 > room) return;
    const left = Math.max(x, 0), right = Math.min(x + width, this.width);
    const middle = right - left > label.length * size * 0.7 ? (left + right) / 2 : x + width / 2;
    pen.text("label", middle, y + height / 2 + size * 0.36 - band / 3, label, shades.ink, { size, alpha });
  }

  /* One RGBA line for a row of boxes narrower than pixels: every pixel is the mean of what it covers. `shades` are those of `SHADES` by op. */
  pixels(row, first, last, shades) {
    const wide = Math.round(this.width * this.ratio), perSecond = this.scale * this.ratio;
    const { from } = this, sums = new Float32Array(wide * 4), out = new Uint8ClampedArray(wide * 4);
    for (let i = first; i < last; i++) {
      const left = Math.max(0, (row.start[i] - from) * perSecond), right = Math.min(wide, (row.end[i] - from) * perSecond);
      const shade = shades[row.op[i]][this.model.shade(row.microbatch[i])];
      const share = this.alpha(row, i);
      for (let pixel = Math.floor(left); pixel < right; pixel++) {
        const cover = (Math.min(right, pixel + 1) - Math.max(left, pixel)) * share, at = pixel * 4;
        sums[at] += shade[0] * cover; sums[at + 1] += shade[1] * cover; sums[at + 2] += shade[2] * cover;
        sums[at + 3] += cover;
      }
    }
    const ground = this.ground(row, wide, perSecond);
    const low = Math.max(0, Math.floor(-from * perSecond));
    const high = Math.min(wide, Math.ceil((this.model.makespan - from) * perSecond));
    for (let pixel = low; pixel < high; pixel++) {
      const at = pixel * 4, rest = Math.max(0, 1 - sums[at + 3]);
      for (let c = 0; c < 3; c++) out[at + c] = sums[at + c] + ground[at - pixel + c] * rest;
      out[at + 3] = 255;
    }
    return out;
  }

  /* The background of a dense row, three numbers per pixel: the track, with stripes where the rank is idle. */
  ground(row, wide, perSecond) {
    const { rgb } = this.state.colours, under = new Uint8ClampedArray(wide * 3);
    for (let at = 0; at < under.length; at++) under[at] = rgb.track[at % 3];
    for (let i = after(row.idleEnd, this.from); i < row.idleEnd.length && row.idleStart[i] < this.to; i++) {
      const tint = rgb.idle[this.model.causes[row.causes[i]]];
      const first = Math.max(0, Math.floor((row.idleStart[i] - this.from) * perSecond));
      const last = Math.min(wide, Math.ceil((row.idleEnd[i] - this.from) * perSecond));
      for (let pixel = first; pixel < last; pixel++) {
        const stripe = pixel % (APART * this.ratio) < this.ratio ? 1 : TINT, share = last - first < APART * this.ratio ? NARROW : stripe;
        for (let c = 0; c < 3; c++) under[3 * pixel + c] = rgb.track[c] + (tint[c] - rgb.track[c]) * share;
      }
    }
    return under;
  }

  exchanges(pen) {
    const { edge } = this.model.ops.find(({ text }) => text === "REDUCE_GRAD");
    for (const { rank, raw } of this.model.rows) {
      for (const [start, seconds] of raw.exchanges) {
        const x = this.edge(start), width = this.edge(start + seconds) - x;
        if (width > 0) pen.rect("mark", x, this.y(rank) + this.rowHeight - 4, width, 4, edge, { name: "exchange" });
      }
    }
  }

  memory(pen, colours) {
    const step = this.memoryHeight + 2;
    this.model.rows.forEach(({ memory }, rank) => {
      this.steps(pen, memory, this.memoryTop + rank * step, this.memoryHeight, this.model.peak, colours.memory);
    });
  }

  queues(pen, colours) {
    const step = this.queueHeight + 2;
    this.model.queues.forEach((queue, at) => {
      this.steps(pen, queue, this.queueTop + at * step, this.queueHeight, this.deepest, colours.queue);
    });
  }

  /* A step curve as an area; several changes within one pixel show their highest. */
  steps(pen, { time, value }, top, height, most, colour) {
    const { colours } = this.state, bottom = top + height, points = [];
    const left = Math.max(0, this.edge(0)), right = Math.min(this.width, this.edge(this.model.makespan));
    if (right <= left) return;
    const add = (x, one) => {
      const y = Math.round((bottom - (height - 1) * Math.min(1, one / (most || 1))) * 10) / 10, n = points.length;
      if (n && points[n - 1][0] >= x) points.pop();
      if (!points.length || points[points.length - 1][1] !== y) points.push([x, y]);
    };
    let at = Math.max(0, after(time, this.from) - 1);
    add(left, value[at]);
    for (at += 1; at < time.length && time[at] < this.to; at++) {
      const x = this.x(time[at]), until = Math.floor(x) + 1;
      let high = value[at], several = false;
      for (; at + 1 < time.length && this.x(time[at + 1]) < until; at++) {
        high = Math.max(high, value[at + 1]);
        several = true;
      }
      add(several ? until - 1 : this.edge(time[at]), high);
      if (several) add(until, value[at]);
    }
    points.push([right, points[points.length - 1][1]]);
    pen.steps("strip", points, bottom, colour);
    pen.rect("strip", left, bottom, right - left, 1, colours.rule);
  }

  /* The critical path's steps from rank to rank. */
  path(pen, colours) {
    const { path, rows } = this.model, middle = (rank) => this.y(rank) + this.rowHeight / 2;
    let d = "";
    for (let i = 1; i < path.length; i++) {
      const [rank, index] = path[i - 1], [next, at] = path[i];
      const x = this.edge(rows[rank].end[index]), to = this.edge(rows[next].start[at]);
      if (rank !== next && to >= 0 && x <= this.width) d += `M${x - 0.5} ${middle(rank)}L${to + 0.5} ${middle(next)}`;
    }
    if (d) pen.path("path", d, { stroke: colours.ink, width: 1.5 });
  }
}

