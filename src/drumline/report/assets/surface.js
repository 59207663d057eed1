/* Two surfaces to draw on with the same calls: SVG while boxes are few, canvas when they are many. */

const SVG = "http://www.w3.org/2000/svg";
const LAYERS = ["track", "grid", "idle", "hatch", "cause", "box", "edge", "label", "mark", "strip", "path"];

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value; else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function svgNode(tag, attributes = {}, parent = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

const APART = 6; // pixels from line to line of a hatch

/* The path of lines across a rectangle, `/`, `\\`, `-`, `|` or several, on one grid so that those of neighbours meet. */
function hatched(x, y, width, height, lines) {
  const right = x + width, bottom = y + height, round = (value) => Math.round(value * 10) / 10;
  let d = "";
  for (const kind of lines) {
    const [low, high] = { "/": [x + y, right + bottom], "\\": [y - right, bottom - x], "|": [x, right], "-": [y, bottom] }[kind];
    for (let step = Math.floor(low / APART) + 1; step * APART < high; step++) {
      const at = step * APART;
      if (kind === "|") d += `M${round(at)} ${y}V${bottom}`;
      else if (kind === "-") d += `M${x} ${round(at)}H${right}`;
      else {
        const slope = kind === "/" ? -1 : 1, ends = [y, bottom].map((edge) => slope * (edge - at));
        const from = Math.max(x, Math.min(...ends)), to = Math.min(right, Math.max(...ends));
        d += `M${round(from)} ${round(at + slope * from)}L${round(to)} ${round(at + slope * to)}`;
      }
    }
  }
  return d;
}

/* Elements are kept between drawings, and only attributes that changed are written. */
class SvgSurface {
  constructor(host) {
    this.node = svgNode("svg", { class: "surface", "aria-hidden": "true", "font-size": 11 }, host);
    this.pools = Object.fromEntries(
      LAYERS.map((name) => [name, { group: svgNode("g", {}, this.node), nodes: [], used: 0 }]));
  }

  begin(width, height) {
    this.set(this.node, { width, height });
    for (const pool of Object.values(this.pools)) pool.used = 0;
  }

  set(node, attributes) {
    const last = (node.last ??= {});
    for (const name in attributes) {
      if (last[name] === attributes[name]) continue;
      last[name] = attributes[name];
      node.setAttribute(name, attributes[name]);
    }
  }

  take(layer, tag, attributes) {
    const pool = this.pools[layer];
    let node = pool.nodes[pool.used];
    if (!node || node.tagName !== tag) {
      const fresh = svgNode(tag);
      if (node) node.replaceWith(fresh); else pool.group.append(fresh);
      pool.nodes[pool.used] = node = fresh;
    }
    pool.used += 1;
    this.set(node, attributes);
    return node;
  }

  rect(layer, x, y, width, height, fill, { radius = 0, alpha = 1, stroke = "none", name = layer } = {}) {
    this.take(layer, "rect", { x, y, width, height, fill, rx: radius, opacity: alpha, stroke, class: name });
  }

  text(layer, x, y, words, fill, { size = 11, anchor = "middle", alpha = 1, halo = "none" } = {}) {
    const node = this.take(layer, "text", { x, y, fill, "font-size": size, "text-anchor": anchor, opacity: alpha,
      stroke: halo, "stroke-width": 4, "paint-order": "stroke", "stroke-linejoin": "round" });
    if (node.words !== words) node.textContent = node.words = words;
  }

  path(layer, d, { fill = "none", stroke = "none", width = 1, alpha = 1, name = layer } = {}) {
    this.take(layer, "path", { d, fill, stroke, "stroke-width": width, "fill-opacity": alpha, class: name });
  }

  /* An area under steps: `points` are pairs of a position and the level from there on; the last one ends it. */
  steps(layer, points, bottom, fill) {
    const [[left, level], ...rest] = points;
    const line = rest.reduce((d, [x, y]) => `${d}H${x}V${y}`, `M${left} ${level}`);
    this.path(layer, `${line}V${bottom}H${left}Z`, { fill, alpha: 0.22 });
    this.path(layer, line, { stroke: fill });
  }

  end() {
    for (const pool of Object.values(this.pools)) {
      for (const node of pool.nodes.splice(pool.used)) node.remove();
    }
  }

  remove() { this.node.remove(); }
}

class CanvasSurface {
  constructor(host, font) {
    this.node = document.createElement("canvas");
    this.node.setAttribute("aria-hidden", "true");
    this.node.className = "surface";
    this.font = font;
    host.append(this.node);
    this.pen = this.node.getContext("2d");
    this.sheet = document.createElement("canvas");
  }

  begin(width, height) {
    this.ratio = window.devicePixelRatio || 1;
    const wide = Math.round(width * this.ratio), high = Math.round(height * this.ratio);
    if (this.node.width !== wide || this.node.height !== high) {
      Object.assign(this.node, { width: wide, height: high });
      Object.assign(this.node.style, { width: `${width}px`, height: `${height}px` });
    }
    this.pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.pen.clearRect(0, 0, width, height);
  }

  rect(layer, x, y, width, height, fill, { radius = 0, alpha = 1, stroke = "none" } = {}) {
    const pen = this.pen;
    pen.globalAlpha = alpha;
    if (fill !== "none") {
      pen.fillStyle = fill;
      if (radius && pen.roundRect) {
        pen.beginPath();
        pen.roundRect(x, y, width, height, radius);
        pen.fill();
      } else pen.fillRect(x, y, width, height);
    }
    if (stroke !== "none") {
      pen.strokeStyle = stroke;
      pen.lineWidth = 1;
      pen.strokeRect(x, y, width, height);
    }
    pen.globalAlpha = 1;
  }

  text(layer, x, y, words, fill, { size = 11, anchor = "middle", alpha = 1, halo = "none" } = {}) {
    const pen = this.pen;
    pen.globalAlpha = alpha;
    pen.fillStyle = fill;
    pen.font = `${size}px ${this.font}`;
    pen.textAlign = anchor === "middle" ? "center" : anchor;
    if (halo !== "none") {
      Object.assign(pen, { strokeStyle: halo, lineWidth: 4, lineJoin: "round" });
      pen.strokeText(words, x, y);
    }
    pen.fillText(words, x, y);
    pen.globalAlpha = 1;
  }

  path(layer, d, { fill = "none", stroke = "none", width = 1, alpha = 1 } = {}) {
    const shape = new Path2D(d), pen = this.pen;
    if (fill !== "none") {
      pen.globalAlpha = alpha;
      pen.fillStyle = fill;
      pen.fill(shape);
      pen.globalAlpha = 1;
    }
    if (stroke !== "none") {
      pen.strokeStyle = stroke;
      pen.lineWidth = width;
      pen.stroke(shape);
    }
  }

  steps(layer, points, bottom, fill) {
    const pen = this.pen;
    pen.fillStyle = fill;
    for (let i = 0; i + 1 < points.length; i++) {
      const [x, y] = points[i], width = points[i + 1][0] - x;
      pen.globalAlpha = 0.22;
      pen.fillRect(x, y, width, bottom - y);
      pen.globalAlpha = 1;
      pen.fillRect(x, y - 0.5, width, 1);
    }
  }

  /* Rows of boxes narrower than a pixel: each pixel gets the mean of what it covers. `rows` are RGBA lines. */
  lines(width, rows, y, height) {
    const wide = Math.round(width * this.ratio);
    if (!rows.length || !wide) return;
    Object.assign(this.sheet, { width: wide, height: rows.length });
    const image = new ImageData(wide, rows.length);
    rows.forEach(({ pixels }, at) => image.data.set(pixels, at * wide * 4));
    this.sheet.getContext("2d").putImageData(image, 0, 0);
    this.pen.imageSmoothingEnabled = false;
    rows.forEach(({ rank }, at) => this.pen.drawImage(this.sheet, 0, at, wide, 1, 0, y(rank), width, height));
  }

  end() {}

  remove() { this.node.remove(); }
}
