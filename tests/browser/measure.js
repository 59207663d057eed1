/* What a page looks like, measured where it is drawn: contrasts of text and marks, and what the keyboard may reach. */
(() => {
  const SAMPLES = 5; // of text that is drawn alike
  const parsed = new Map(), canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;

  /* Any CSS colour as [r, g, b, a], by painting it. */
  function colour(text) {
    if (!parsed.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = "#0000";
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      parsed.set(text, [r, g, b, a / 255]);
    }
    return parsed.get(text);
  }
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const faded = ([r, g, b, a], alpha) => [r, g, b, a * alpha];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const paper = () => (getComputedStyle(document.documentElement).colorScheme.includes("dark")
    && matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1]);

  function opacity(node) {
    let product = 1;
    for (let at = node; at instanceof Element; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
    return product;
  }

  /* How an element paints a point of its inside, or null. */
  function paint(node, x, y) {
    const style = getComputedStyle(node);
    if (!(node instanceof SVGElement) || node.tagName === "svg") return faded(colour(style.backgroundColor), opacity(node));
    if (!node.isPointInFill || style.fill === "none") return null;
    const at = new DOMPoint(x, y).matrixTransform(node.getScreenCTM().inverse());
    if (!node.isPointInFill(at)) return null;
    return faded(colour(style.fill), opacity(node) * Number(style.fillOpacity));
  }

  /* What lies under a point of an element: everything below it there, painted over each other. */
  function ground(node, x, y) {
    const here = document.elementsFromPoint(x, y), from = here.indexOf(node);
    let below = from >= 0 ? here.slice(from + 1) : here.filter((one) => !node.contains(one) && paintsBefore(one, node));
    if (!(node instanceof SVGElement) && from >= 0) below = [node, ...below];
    if (!below.length) for (let at = node; at; at = at.parentElement) below.push(at);
    return below.map((one) => paint(one, x, y)).filter(Boolean).reduceRight((under, one) => over(one, under), paper());
  }
  const paintsBefore = (one, node) => Boolean(one.compareDocumentPosition(node) & 4) || one.contains(node);

  function visible(node) {
    return node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !node.closest(".unseen, noscript");
  }

  function named(node) {
    const name = typeof node.className === "string" ? node.className : node.className?.baseVal ?? "";
    return `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}${name ? `.${name.trim().replaceAll(" ", ".")}` : ""}`;
  }

  /* Of things that are drawn alike some visible ones, from the first to the last. */
  function sampled(found) {
    const groups = new Map();
    for (const node of found) {
      const key = [named(node), named(node.parentElement), node.getAttribute("fill"), node.getAttribute("font-size")].join();
      if (!groups.has(key)) groups.set(key, new Set());
      groups.get(key).add(node);
    }
    return [...groups.values()].flatMap((group) => {
      const all = [...group], kept = [];
      const stride = Math.max(1, Math.floor(all.length / SAMPLES));
      for (let at = 0; at < all.length && kept.length < SAMPLES; at += stride) if (visible(all[at])) kept.push(all[at]);
      return kept;
    });
  }

  /* Every visible text with too little contrast, as [text, element, contrast, needed]. */
  function texts(normal, large) {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
      if (text.data.trim() && !["SCRIPT", "STYLE", "title", "OPTION"].includes(text.parentElement.tagName)) found.push(text.parentElement);
    }
    const range = document.createRange(), low = [];
    let measured = 0;
    for (const node of sampled(found)) {
      range.selectNodeContents([...node.childNodes].find((one) => one.nodeType === 3 && one.data.trim()));
      const box = [...range.getClientRects()].find(({ width, height }) => width > 0 && height > 0);
      const edge = node.closest(".plot, .scroll")?.getBoundingClientRect().right ?? innerWidth; // beyond it text is cut away
      if (!box || box.left + box.width / 2 >= Math.min(edge, innerWidth) - 1 || box.top + box.height / 2 >= innerHeight) continue;
      measured += 1;
      const style = getComputedStyle(node), drawn = node instanceof SVGElement;
      const halo = drawn && style.stroke !== "none" && parseFloat(style.strokeWidth) >= 3;
      const under = halo ? colour(style.stroke) : ground(node, box.left + box.width / 2, box.top + box.height / 2);
      const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
      const needed = size >= 24 || (bold && size >= 18.66) ? large : normal;
      const value = contrast(over(faded(colour(drawn ? style.fill : style.color), opacity(node)), under), under);
      if (value < needed) low.push([range.toString().trim().slice(0, 40), named(node), Number(value.toFixed(2)), needed]);
    }
    return { measured, low };
  }

  /* Marks lose their titles to data-said once they were pointed at. */
  const MARKS = ".surface .hatch, .surface .box:not([stroke=none]), .legend path, .bar .part, .swatch .part, .curve .line, #scatter circle, svg[aria-label] polyline, "
    + "svg[aria-label] circle, svg[aria-label] path[stroke-width], .plane .series line, svg[aria-label] rect:not(.aim):is(:has(title), [data-said])";

  /* Every mark with too little contrast against what lies around it: its strongest paint counts. */
  function marks(needed) {
    const low = [];
    let measured = 0;
    for (const node of sampled(document.querySelectorAll(MARKS))) {
      const style = getComputedStyle(node), svg = node.closest("svg"), alpha = opacity(node);
      const { left, top, width, height } = svg.getBoundingClientRect();
      if (!width || !height) continue;
      const sheet = node.closest("svg[aria-label]")?.querySelector(":scope > rect[width='100%']");
      const track = node.closest(".surface")?.querySelector("rect.track") ?? (node.closest(".legend") ? node.parentNode.querySelector("rect") : null);
      const under = track || sheet ? over(colour(getComputedStyle(track ?? sheet).fill), paper()) : ground(svg, left + width - 1, top + 1);
      const paints = [["fill", style.fill, Number(style.fillOpacity)], ["stroke", style.stroke, Number(style.strokeOpacity)]];
      const values = paints.filter(([, one]) => one !== "none")
        .map(([, one, own]) => contrast(over(faded(colour(one), own * alpha), under), under));
      measured += 1;
      const value = Math.max(0, ...values);
      if (value < needed) low.push([named(node), style.fill, style.stroke, Number(value.toFixed(2))]);
    }
    return { measured, low };
  }

  /* A contrast read from the pixels of a timeline's canvas: of a rank's hatch, box, rim, label, cause or axis between two times. */
  function pixels(what, rank, from, to) {
    const node = document.querySelector("canvas.surface"), { left, top, width } = node.getBoundingClientRect(), ratio = node.width / width;
    const style = getComputedStyle(document.documentElement), track = colour(style.getPropertyValue("--track").trim());
    const background = colour(getComputedStyle(document.body).backgroundColor);
    const [start, end] = [window.drumline.place(rank, from), window.drumline.place(rank, to)];
    const half = window.drumline.place(0, 0).y - top, middle = (start.x + end.x) / 2 - left, y = start.y - top;
    if (node.read?.theme !== style.colorScheme) { // one reading of each drawing: every further one is slow, and says so
      const copy = new OffscreenCanvas(node.width, node.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(node, 0, 0);
      node.read = { theme: style.colorScheme, data: copy.getImageData(0, 0, node.width, node.height).data };
    }
    const { data } = node.read;
    const read = (x, down, wide, high) => {
      const found = [], [fromX, fromY] = [x, down].map((one) => Math.round(one * ratio));
      for (let row = fromY; row < fromY + Math.max(1, Math.floor(high * ratio)); row++) {
        for (let column = fromX; column < fromX + Math.max(1, Math.floor(wide * ratio)); column++) {
          const [r, g, b, a] = data.subarray(4 * (row * node.width + column));
          found.push(over([r, g, b, a / 255], background));
        }
      }
      return found;
    };
    const most = (pixels) => {
      const counts = new Map();
      for (const one of pixels) counts.set(String(one), (counts.get(String(one)) ?? 0) + 1);
      return [...counts].sort(([, a], [, b]) => b - a)[0][0].split(",").map(Number);
    };
    const furthest = (pixels, under) => Math.max(...pixels.map((one) => contrast(one, under)));
    const x = start.x - left, wide = end.x - start.x;
    const reads = {
      hatch: () => furthest(read(x + 1, y - half + 1, Math.min(wide - 2, 14), 2 * half - 2), track), // left of the cause's name
      box: () => furthest([...read(x + 0.5, y, 0, 0), ...read(x + 3, y - half + 3, 0, 0)], track), // its rim or its fill
      rim: () => Math.max(...[y - half, y].map((down) => contrast(most(read(x, down, wide, 1)), track))), // or the fill
      label: () => { const found = read(middle - 7, y - 5, 14, 10); return furthest(found, most(found)); },
      cause: () => { const found = read(middle - 10, y - 4, 20, 8); return furthest(found, track); },
      axis: () => furthest(read(x, y + half + 6, wide, 14), background),
    };
    return reads[what]();
  }

  const REACH = "a[href], button, select, input:not([type=file]), textarea, summary, [tabindex]";
  let seen = [];
  document.addEventListener("focusin", () => seen.push(focused()));

  /* Number all that takes the keyboard, and return their names; from now on what has the focus is written down. */
  function listen() {
    document.body.tabIndex = -1;
    document.body.focus({ preventScroll: true }); // so that the first Tab goes to the first of them
    document.body.removeAttribute("tabindex");
    seen = [];
    const found = [...document.querySelectorAll(REACH)].filter((node) => visible(node) && !node.disabled && node.tabIndex >= 0);
    found.forEach((node, at) => { node.dataset.reach = String(at); });
    return found.map(named);
  }

  /* What has the focus, and how far its ring stands out; 0 where there is none. */
  function focused() {
    const node = document.activeElement, style = getComputedStyle(node), box = node.getBoundingClientRect();
    const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 ? style.outlineColor
      : style.boxShadow.match(/rgba?\([^)]*\)|color\([^)]*\)/)?.[0];
    const under = ground(node.parentElement ?? node, Math.max(1, Math.min(innerWidth - 2, box.left - 3)), box.top + box.height / 2);
    const [low, high] = [Math.max(0, box.top), Math.min(innerHeight, box.bottom)], at = Math.min(innerWidth - 1, Math.max(0, (box.left + box.right) / 2));
    const over_it = document.elementFromPoint(at, (low + high) / 2), covered = !over_it || !(node.contains(over_it) || over_it.contains(node));
    return { reach: node.dataset.reach ?? null, name: named(node), covered, ring: ring ? Number(contrast(over(colour(ring), under), under).toFixed(2)) : 0 };
  }
  const reached = () => seen;

  /* Go to each that `listen` numbered, as Tab would, and ask whether a script keeps the key for itself. */
  function visited() {
    seen = [];
    for (const node of document.querySelectorAll("[data-reach]")) {
      node.focus({ preventScroll: false });
      if (document.activeElement !== node) continue;
      const event = new KeyboardEvent("keydown", { key: "Tab", bubbles: true, cancelable: true });
      seen[seen.length - 1].trapped = !node.dispatchEvent(event);
    }
    return seen;
  }

  /* Once all that was asked for is on the screen. */
  const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))));

  /* Whatever reaches beyond the window, and is not inside something that scrolls by itself. */
  function overflowing() {
    const scrolls = (node) => {
      for (let at = node.parentElement; at && at !== document.body; at = at.parentElement) {
        if (getComputedStyle(at).overflowX !== "visible") return true;
      }
      return false;
    };
    const wide = document.documentElement.clientWidth + 0.5;
    return [...document.body.querySelectorAll("*")].filter((node) => node.getBoundingClientRect().right > wide && visible(node) && !scrolls(node)
      && !node.closest(".unseen, .sidebar-drawer, .toc-drawer")).map((node) => `${named(node)} to ${Math.round(node.getBoundingClientRect().right)}`);
  }

  /* Boxes with more inside than they show, unless they scroll and the keyboard reaches them; in a wide window none may
     scroll sideways but text that was written for a terminal. */
  function cut(wide) {
    const found = [];
    for (const node of document.body.querySelectorAll("*")) {
      if (!(node instanceof HTMLElement) || !node.clientWidth || node.matches(".unseen, .plot, select, input") || !visible(node)) continue;
      const style = getComputedStyle(node), sideways = node.scrollWidth - node.clientWidth, down = node.scrollHeight - node.clientHeight;
      const scrolls = (overflow) => ["auto", "scroll"].includes(overflow), reached = node.tabIndex >= 0 && Boolean(node.ariaLabel);
      if (sideways > 1 && !(scrolls(style.overflowX) && reached && (!wide || node.tagName === "PRE"))) {
        found.push(`${named(node)} is ${sideways} px too wide${scrolls(style.overflowX) && !reached ? ", scrolls, and cannot be focused" : ""}`);
      }
      if (down > 1 && style.overflowY !== "visible" && !(scrolls(style.overflowY) && reached)) found.push(`${named(node)} is ${down} px too high`);
    }
    for (const svg of document.querySelectorAll("svg[aria-label]:not(.bar)")) {
      if (!visible(svg)) continue;
      const { left, right, top, bottom } = (svg.closest("figure") ?? svg).getBoundingClientRect();
      const words = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
      for (const [at, [text, box]] of words.entries()) {
        if (box.left < left - 1 || box.right > right + 1 || box.top < top - 1 || box.bottom > bottom + 1) found.push(`${text} is outside of its picture`);
        const on = words.slice(0, at).find(([, one]) => Math.min(one.right, box.right) - Math.max(one.left, box.left) > 1
          && Math.min(one.bottom, box.bottom) - Math.max(one.top, box.top) > 4);
        if (on) found.push(`${text} lies on ${on[0]}`);
      }
    }
    return found;
  }

  /* Large areas as light as the other theme's paper. */
  function foreign() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches, found = [];
    for (const node of document.querySelectorAll("body *")) {
      const sheet = node instanceof SVGElement && node.matches("svg[aria-label] > rect[width='100%']");
      if (!sheet && !(node instanceof HTMLElement)) continue;
      const [r, g, b, a] = colour(getComputedStyle(node)[sheet ? "fill" : "backgroundColor"]);
      const { width, height } = node.getBoundingClientRect();
      if (a < 0.9 || width * height < 5000 || !visible(node)) continue;
      if (dark ? light([r, g, b]) > 0.1 : light([r, g, b]) < 0.7) found.push(`${named(node)} in ${named(node.parentElement)} is rgb(${r}, ${g}, ${b})`);
    }
    return found;
  }

  /* Pairs of things that the keyboard reaches one after the other, though people read them the other way round. */
  function disordered() {
    scrollTo(0, 0);
    const nodes = [...document.querySelectorAll("[data-reach]")].filter(visible);
    const boxes = nodes.map((node) => node.getBoundingClientRect());
    return nodes.slice(1).flatMap((node, at) => {
      const [before, after] = [boxes[at], boxes[at + 1]];
      const above = after.bottom <= before.top + 1 && after.left < before.right - 1;
      const level = Math.min(before.bottom, after.bottom) - Math.max(before.top, after.top) > 4;
      return above || (level && after.right <= before.left + 1) || node.tabIndex > 0 ? [`${named(nodes[at])} comes before ${named(node)}`] : [];
    });
  }

  const PLACES = { contents: ".contents", timeline: ".heading", table: "table", steps: ".curve", chart: ".plane", legend: ".keys", bars: ".row", details: "summary" };

  /* Where a run has its colour, as [run, place, colour]. */
  function runs() {
    return [...document.querySelectorAll("[data-run]")].filter(visible).map((node) => {
      const style = getComputedStyle(node);
      const place = Object.keys(PLACES).find((name) => node.closest(PLACES[name])) ?? named(node.parentElement);
      return [node.dataset.run, place, [style.fill, style.stroke].find((one) => one !== "none" && colour(one)[3] > 0) ?? ""];
    });
  }

  const all = (normal, large, needed, layout) => ({ texts: texts(normal, large), marks: marks(needed), beyond: [...foreign(), ...(layout ? overflowing() : [])],
    wide: document.documentElement.scrollWidth, paper: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" });
  window.measure = { all, canvas: pixels, texts, marks, overflowing, cut, disordered, runs, listen, reached, visited, drawn };
})();
