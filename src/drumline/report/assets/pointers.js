/* Mouse, fingers and wheel. */

class Pointers {
  constructor(page, explainer) {
    Object.assign(this, { page, explainer, held: new Map() });
    document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) explainer.leave(); });
  }

  listen(chart) {
    const { plot } = chart;
    const place = (event) => {
      const { left, top } = plot.getBoundingClientRect();
      return { x: event.clientX - left, y: event.clientY - top };
    };
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.held.set(event.pointerId, { ...place(event), moved: 0 });
      if (event.pointerType === "mouse") plot.setPointerCapture(event.pointerId);
      this.grip(chart);
    });
    plot.addEventListener("pointermove", (event) => {
      const here = place(event), finger = this.held.get(event.pointerId);
      if (!finger) return this.explainer.hover(chart, here, event);
      finger.moved += Math.abs(here.x - finger.x);
      Object.assign(finger, here);
      if (finger.moved > 3 || this.held.size > 1) this.drag(chart);
      return undefined;
    });
    const release = (event) => {
      const finger = this.held.get(event.pointerId);
      this.held.delete(event.pointerId);
      plot.classList.remove("dragging");
      this.grip(chart);
      if (event.type === "pointerup" && finger && finger.moved <= 3) this.explainer.hover(chart, place(event), event);
    };
    plot.addEventListener("pointerup", release);
    plot.addEventListener("pointercancel", release);
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !this.explainer.walking) this.explainer.leave();
    });
    plot.addEventListener("dblclick", (event) => this.page.zoom(2.5, chart.time(place(event).x)));
    plot.addEventListener("wheel", (event) => this.wheel(chart, event, place(event).x), { passive: false });
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) this.explainer.enter(chart); });
    plot.addEventListener("blur", () => { if (this.explainer.walking) this.explainer.leave(); });
  }

  /* Remember which times lie under the fingers: dragging and pinching keep them there. */
  grip(chart) {
    for (const finger of this.held.values()) finger.time = chart.time(finger.x);
  }

  drag(chart) {
    const { view } = this.page.state, [one, two] = [...this.held.values()];
    chart.plot.classList.add("dragging");
    this.explainer.leave();
    if (two && Math.abs(two.x - one.x) > 8 && two.time !== one.time) {
      const scale = Math.abs((two.x - one.x) / (two.time - one.time));
      view.set(one.time - one.x / scale, one.time - one.x / scale + chart.width / scale);
    } else if (!two) {
      view.pan(one.time - (view.from + (one.x * view.width) / chart.width));
    }
    this.page.moved();
  }

  /* The wheel zooms; if there is nothing to zoom, it scrolls the page until it rests. */
  wheel(chart, event, x) {
    const { view } = this.page.state, sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const now = performance.now(), scrolling = now - (this.scrolledAt ?? -1e9) < 350;
    if (!sideways && !event.ctrlKey && (scrolling || (view.wide && event.deltaY > 0))) {
      this.scrolledAt = now;
      return;
    }
    event.preventDefault();
    const pixels = (event.deltaMode ? 30 : 1) * (sideways ? event.deltaX || event.deltaY : event.deltaY);
    if (sideways) this.page.pan(pixels / chart.width);
    else {
      const rate = event.ctrlKey ? 0.01 : 0.0022; // a pinch on a touchpad comes as a wheel with Ctrl, in small steps
      this.page.zoom(Math.exp(-Math.max(-240, Math.min(240, pixels)) * rate), chart.time(x));
    }
    this.explainer.leave();
  }
}
