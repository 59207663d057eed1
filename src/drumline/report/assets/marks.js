/* The values of a picture's marks: point at a mark, or press Tab to reach the picture and arrow keys to go from mark to
   mark. A mark is whatever has a <title>; marks with the same parent are a series. */

class Marks {
  constructor(pictures = "svg[role=img]:not(.bar):has(title), .bars, #scatter") {
    const add = (className) => {
      const node = document.createElement("div");
      node.className = className;
      node.hidden = className !== "unseen";
      document.body.append(node);
      return node;
    };
    Object.assign(this, { shown: null, tip: add("tip said"), ring: add("ring"), dots: [] });
    this.live = document.getElementById("live") ?? add("unseen");
    this.live.setAttribute("role", "status");
    for (const host of document.querySelectorAll(pictures)) this.listen(host);
    for (const name of ["scroll", "resize"]) window.addEventListener(name, () => this.place(), { capture: true, passive: true });
    document.addEventListener("pointerdown", (event) => { if (!event.target.closest?.("[data-said]")) this.leave(); });
  }

  listen(host) {
    const name = host.getAttribute("aria-label") ?? host.closest(".card, .panel")?.querySelector("h2, h3")?.textContent ?? "";
    const said = { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${name}. Arrow keys go from value to value.` };
    for (const [attribute, value] of Object.entries(said)) host.setAttribute(attribute, value);
    host.addEventListener("focus", () => { if (host.matches(":focus-visible")) this.walkTo(host, host.walked ?? [0, 0]); });
    host.addEventListener("blur", () => this.leave());
    host.addEventListener("keydown", (event) => this.key(host, event));
    host.addEventListener("pointerover", (event) => {
      this.series(host); // takes the titles, so that the browser's own tooltip does not show as well
      const mark = event.target.closest("[data-said]");
      if (mark) this.show({ find: () => mark, pointer: event });
    });
    host.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && this.shown?.pointer) this.leave();
    });
  }

  /* The marks series by series, each from left to right; read anew, because some pictures are drawn anew. */
  series(host) {
    for (const title of host.querySelectorAll("title")) {
      title.parentNode.dataset.said = title.textContent;
      title.remove();
    }
    const found = new Map();
    for (const mark of host.querySelectorAll("[data-said]")) {
      if (!found.has(mark.parentNode)) found.set(mark.parentNode, []);
      found.get(mark.parentNode).push(mark);
    }
    return [...found.values()].map((marks) => marks.sort((one, other) => this.middle(one) - this.middle(other)));
  }

  middle(mark) {
    const { left, right } = mark.getBoundingClientRect();
    return (left + right) / 2;
  }

  key(host, event) {
    const { key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (key === "Escape") this.leave();
    else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(key)) {
      event.preventDefault();
      event.stopPropagation(); // or the timelines would pan as well
      this.walk(host, key);
    }
  }

  walk(host, key) {
    const series = this.series(host), [line, at] = host.walked ?? [0, 0], last = (series[line]?.length ?? 1) - 1;
    const along = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (series.length === 1) Object.assign(along, { ArrowUp: at - 1, ArrowDown: at + 1 });
    if (key in along) this.walkTo(host, [line, Math.max(0, Math.min(last, along[key]))]);
    else {
      const next = line + (key === "ArrowDown" ? 1 : -1), here = this.middle(series[line][at]);
      const apart = series[next]?.map((mark) => Math.abs(this.middle(mark) - here));
      this.walkTo(host, apart ? [next, apart.indexOf(Math.min(...apart))] : [line, at]);
    }
  }

  walkTo(host, [line, at]) {
    const find = () => this.series(host)[line]?.[at], mark = find();
    if (!mark) return;
    host.walked = [line, at];
    mark.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.show({ find, pointer: null });
    this.live.textContent = mark.dataset.said.replaceAll("\n", ", ");
  }

  show(shown) {
    this.shown = shown;
    this.place();
  }

  leave() { this.show(null); }

  /* Put the ring around the mark, dots on the curves, and the words beside it. */
  place() {
    const { shown, tip, ring } = this, mark = shown?.find();
    tip.hidden = !mark;
    ring.hidden = !mark || Boolean(shown.pointer);
    for (const dot of this.dots.splice(0)) dot.remove();
    if (!mark) return;
    const { left, right, top, bottom } = mark.getBoundingClientRect(), wide = Math.max(right - left, 4);
    this.at(ring, (left + right - wide) / 2 - 4, top - 4, wide + 8, bottom - top + 8);
    ring.classList.toggle("round", mark.tagName === "circle");
    for (const point of mark.dataset.dots?.split(" ") ?? []) this.dot(mark, ...point.split(",").map(Number));
    if (tip.textContent !== mark.dataset.said) tip.textContent = mark.dataset.said;
    const x = shown.pointer?.clientX ?? right, y = shown.pointer?.clientY ?? bottom, { offsetWidth, offsetHeight } = tip;
    const beside = x + 14 + offsetWidth > window.innerWidth - 8 ? (shown.pointer?.clientX ?? left) - 14 - offsetWidth : x + 14;
    const below = y + 14 + offsetHeight > window.innerHeight - 8 ? (shown.pointer?.clientY ?? top) - 14 - offsetHeight : y + 14;
    this.at(tip, Math.max(8, beside), Math.max(8, below));
  }

  dot(mark, x, y) {
    const place = new DOMPoint(x, y).matrixTransform(mark.ownerSVGElement.getScreenCTM()), dot = document.createElement("div");
    dot.className = "ring round";
    document.body.append(dot);
    this.at(dot, place.x - 5, place.y - 5, 10, 10);
    this.dots.push(dot);
  }

  at(node, left, top, width, height) {
    node.style.left = `${left}px`;
    node.style.top = `${top}px`;
    if (width !== undefined) Object.assign(node.style, { width: `${width}px`, height: `${height}px` });
  }
}

/* What scrolls takes the keyboard while more is in it than fits, and says what it is: not every browser does so alone. */
class ScrollBoxes {
  constructor(boxes = ".scroll, pre, .stage") {
    this.watch = new ResizeObserver((entries) => { for (const { target } of entries) if (target.closest(boxes)) this.look(target.closest(boxes)); });
    for (const box of document.querySelectorAll(boxes)) this.listen(box);
  }

  /* Call it again once other things are in the box. */
  listen(box) {
    for (const one of [box, ...box.children]) this.watch.observe(one);
    this.look(box);
  }

  look(box) {
    const more = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    const heading = box.closest(".card, .panel, .report, .stage, body").querySelector("h2, h3, h1");
    const said = more ? { tabindex: "0", role: "region", "aria-label": `${heading?.textContent.trim() ?? "more"}, scrolls` } : {};
    for (const name of ["tabindex", "role", "aria-label"]) {
      if (name in said) box.setAttribute(name, said[name]); else box.removeAttribute(name);
    }
  }
}
