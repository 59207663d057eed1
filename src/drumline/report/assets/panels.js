/* Everything around the timelines: legend, summary table, trade-off plot. */

function legend(models, state) {
  const used = new Set(), causes = new Set(), [first] = models;
  let further = false, pairs = false;
  for (const { rows } of models) {
    for (const row of rows) {
      for (const op of row.op) used.add(op);
      for (const op of row.later.op) used.add(op);
      for (const cause of row.causes) causes.add(cause);
      further ||= row.local.some(Boolean);
      pairs ||= row.later.op.length > 0;
      if (row.raw.exchanges.length) used.add(first.ops.findIndex(({ text }) => text === "REDUCE_GRAD"));
    }
  }
  const entry = (name, ...boxes) => {
    const swatch = svgNode("svg", { width: 20, height: 12, "aria-hidden": "true" });
    for (const [x, y, width, height, fill, stroke] of boxes) {
      svgNode("rect", { x, y, width, height, fill }, swatch);
      if (stroke) svgNode("path", { d: hatched(x, y, width, height, stroke.lines), stroke: stroke.colour, fill: "none" }, swatch);
    }
    return element("span", {}, swatch, name);
  };
  const entries = [];
  first?.ops.forEach(({ name, even, odd }, op) => {
    if (used.has(op)) entries.push(entry(name, [0, 0, 10, 12, even], [10, 0, 10, 12, odd]));
  });
  const [forward, backward] = first?.ops ?? [];
  if (pairs) entries.push(entry("overlapped pair", [0, 0, 20, 6, forward.even], [0, 6, 20, 6, backward.even]));
  if (further) entries.push(entry("further stage of the rank", [0, 0, 20, 12, forward.even], [0, 9, 20, 3, forward.edge]));
  for (const cause of [...causes].sort()) {
    const name = first.causes[cause];
    const stroke = { lines: first.hatches[name], colour: state.colours.idle[name] };
    entries.push(entry(`idle: ${name}`, [0, 0, 20, 12, state.colours.track, stroke]));
  }
  return entries;
}

/* The square with the colour of a timeline's run, if the page has several runs. */
function sign(run) {
  if (!run) return [];
  const swatch = svgNode("svg", { class: "swatch" });
  svgNode("rect", { class: `part ${run.kind}`, "data-run": run.name }, swatch);
  return [swatch, " "];
}

function summary(models) {
  const anyBytes = models.some((model) => model.bytesKnown);
  /* Programs over several steps, or with smaller stages, compare only per microbatch and per whole rank. */
  const differ = (value) => new Set(models.map(value)).size > 1;
  const perRank = (m) => m.raw.stages / m.rows.length;
  const columns = [
    ...(differ((m) => m.raw.microbatches) ? [["per microbatch", (m) => Number((m.raw.makespan / m.raw.microbatches).toPrecision(4)), timeText, true]] : []),
    ["makespan", (m) => m.raw.makespan, timeText, true], [models[0]?.raw.bubble_of ?? "bubble", (m) => m.raw.bubble, percent, true],
    ["span bubble", (m) => m.raw.span_bubble, percent, true],
    ["peak activations", (m) => m.raw.peak_activations, String, !differ(perRank)],
    ...(differ(perRank) ? [["microbatches held", (m) => m.raw.peak_activations / perRank(m), number, true]] : []),
    ...(anyBytes ? [["peak bytes", (m) => m.raw.peak_bytes, (n) => (n === null ? "unknown" : bytes(n)), true]] : []),
    ["ranks", (m) => m.rows.length, String], ["stages", (m) => m.raw.stages, String],
    ["microbatches", (m) => m.raw.microbatches, String], ["actions", (m) => m.raw.boxes, (n) => n.toLocaleString("en")],
  ];
  const least = columns.map(([, value]) => Math.min(...models.map((model) => value(model) ?? Infinity)));
  const head = element("tr", {}, element("th", { textContent: "schedule", scope: "col" }),
    ...columns.map(([name]) => element("th", { textContent: name, scope: "col" })));
  const lines = models.map((model, at) => element("tr", {},
    element("td", {}, ...sign(model.raw.run), element("a", { href: `#timeline-${at}`, textContent: model.name })),
    ...columns.map(([, value, shown, compared], column) => {
      const best = compared && models.length > 1 && value(model) !== null && value(model) <= least[column] * (1 + 1e-9);
      return element("td", { textContent: shown(value(model)), className: best ? "best" : "" });
    })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
}

/* Bubble against peak memory, a point per schedule; the line joins those that no other beats in both. A point
   far worse than many others would squeeze them together: it is drawn at the upper edge, with its value. */
function scatter(points, colours, width) {
  const height = Math.max(300, Math.min(400, width * 0.6)), left = 44, right = 16, top = 30, bottom = height - 44;
  const sorted = points.map((p) => p.bubble).sort((a, b) => b - a), second = sorted.find((value) => value < sorted[0]) ?? 0;
  const crowded = points.length > 6 && second > 0.01 && sorted[0] > 2 * second;
  const most = crowded ? second * 1.3 : Math.max(sorted[0], 0.01) * 1.1;
  const widest = Math.max(...points.map((p) => p.peak_share), 1e-9) * 1.12;
  const x = (value) => left + (value / widest) * (width - left - right);
  const y = (value) => bottom - (Math.min(value, most) / most) * (bottom - top);
  const svg = svgNode("svg", { width, height, role: "img", "font-size": 11,
    "aria-label": `Bubble against peak memory of ${points.length} schedules` });
  const words = (at, down, text, fill, anchor = "middle") => {
    svgNode("text", { x: at, y: down, fill, "text-anchor": anchor }, svg).textContent = text;
  };
  for (const value of tickTimes({ from: 0, to: most }, 400)) {
    svgNode("path", { d: `M${left} ${y(value)}H${width - right}`, stroke: colours.rule }, svg);
    words(left - 8, y(value) + 4, percent(value), colours.muted, "end");
  }
  for (const value of tickTimes({ from: 0, to: widest }, 500)) words(x(value), bottom + 18, number(value), colours.muted);
  words((left + width - right) / 2, height - 6, "microbatches held by the fullest rank", colours.muted);
  words(0, 11, "bubble", colours.muted, "start");
  const best = undominated(points), corners = best.map((p) => [x(p.peak_share), y(p.bubble)]);
  const line = corners.map(([at, down], i) => (i ? `H${at}V${down}` : `M${at} ${down}`)).join("");
  if (line) svgNode("path", { d: line, fill: "none", stroke: colours.accent, "stroke-dasharray": "3 4" }, svg);
  const obstacles = corners.slice(1).flatMap(([at, down], i) => {
    const [fromX, fromY] = corners[i];
    return [[fromX, fromY - 2, at, fromY + 2], [at - 2, fromY, at + 2, down]];
  });
  const spots = gathered(points, best, x, y);
  placeLabels(spots, (p) => p.name + (p.bubble > most ? ` ${percent(p.bubble)} ↑` : "") + (p.fits ? "" : " (over)"), obstacles,
    { left, right: width, bottom });
  for (const { members, at, down, lit, label } of spots) {
    const colour = lit ? colours.accent : colours.muted;
    const dot = svgNode("circle", { cx: at, cy: down, r: 5, class: "point", stroke: colour, "stroke-width": 1.5,
      fill: members.some((p) => p.fits) ? colour : colours.paper }, svg);
    svgNode("title", {}, dot).textContent = members.map((p) =>
      `${p.name}: bubble ${percent(p.bubble)}, ${number(p.peak_share)} microbatches held${p.fits ? "" : ", over the limit"}`).join("\n");
    if (label) words(label.x, label.y, label.text, lit ? colours.ink : colours.muted, label.anchor);
  }
  return svg;
}

/* The points that fit and that no other fitting one beats, from the least memory to the most. */
function undominated(points) {
  const fitting = points.filter((p) => p.fits);
  const beaten = (p) => fitting.some((q) => q.bubble <= p.bubble && q.peak_share <= p.peak_share
    && (q.bubble < p.bubble || q.peak_share < p.peak_share));
  return fitting.filter((p) => !beaten(p)).sort((p, q) => p.peak_share - q.peak_share);
}

/* Points grouped by position, because those at the same position share a dot and a label; the best come first. */
function gathered(points, best, x, y) {
  const spots = new Map();
  for (const point of points) {
    const at = x(point.peak_share), down = y(point.bubble), key = `${Math.round(at)},${Math.round(down)}`;
    if (!spots.has(key)) spots.set(key, { members: [], at, down, lit: false });
    spots.get(key).members.push(point);
    spots.get(key).lit ||= best.includes(point);
  }
  return [...spots.values()].sort((a, b) => b.lit - a.lit);
}

/* Put each label on the first side where it covers nothing; if many names do not fit, try the first plus a count. */
function placeLabels(spots, nameOf, obstacles, room) {
  const taken = [...obstacles, ...spots.map(({ at, down }) => [at - 7, down - 7, at + 7, down + 7])];
  for (const spot of spots) {
    const { at, down, members } = spot, names = members.map(nameOf);
    const sides = [["start", at + 10, down + 4], ["end", at - 10, down + 4], ["middle", at, down - 11], ["middle", at, down + 19],
      ["start", at + 8, down - 9], ["start", at + 8, down + 17], ["end", at - 8, down - 9], ["end", at - 8, down + 17]];
    const texts = [names.join(", "), ...(names.length > 1 ? [`${names[0]} +${names.length - 1}`] : [])];
    const options = texts.flatMap((text) => sides.map(([anchor, x, y]) => ({ anchor, x, y, text, wide: text.length * 6.3 })));
    spot.label = options.find(({ anchor, x, y, wide }) => {
      const low = anchor === "start" ? x : anchor === "end" ? x - wide : x - wide / 2, high = low + wide;
      const free = !taken.some((one) => low < one[2] && high > one[0] && y - 10 < one[3] && y + 3 > one[1]);
      if (!free || low < room.left || high > room.right || y < 10 || y + 3 > room.bottom) return false;
      taken.push([low, y - 10, high, y + 3]);
      return true;
    });
  }
}
