// The timeline: work of the CPU and the GPU, batch by batch, on one canvas.
//
//   lane      | each kind of work has its own lane, so that name and place identify it, not only a colour
//   zoomed in | every span is a box
//   zoomed out| spans thinner than a pixel are added up: the height of a column is the share of its time they fill
"use strict";

const LANE = 26, LANE_GAP = 6, GROUP_GAP = 14, AXIS = 26, NARROWEST_US = 20;

/** Black or white, whichever is more legible on a colour. */
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255).map((c) => c ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#101214" : "#ffffff";
}

class Timeline {
  /** `groups` is [{name, lanes: [{name, colour}], spans: {start, stop, lane, ...}, describe(i)}], spans by start. */
  constructor(host, groups, [first_us, last_us], rangeText) {
    this.host = host; this.groups = groups; this.rangeText = rangeText;
    this.first_us = first_us; this.span_us = Math.max(last_us - first_us, NARROWEST_US);
    this.from = first_us; this.to = first_us + this.span_us;
    this.canvas = el("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Timeline of CPU and GPU work. Arrow keys move, plus and minus zoom, 0 shows everything.");
    this.tip = el("div", "tip");
    this.tip.hidden = true;
    host.replaceChildren(this.canvas, this.tip);
    let y = 4;
    for (const group of groups) {
      group.top = y;
      y += 18;
      for (const lane of group.lanes) { lane.top = y; y += LANE + LANE_GAP; }
      y += GROUP_GAP;
      // The longest span bounds how far left of the view a visible span may start.
      group.longest = 0;
      for (let i = 0; i < group.spans.start.length; i++) {
        group.longest = Math.max(group.longest, group.spans.stop[i] - group.spans.start[i]);
      }
    }
    this.height = y - GROUP_GAP + AXIS;
    this.canvas.style.height = `${this.height}px`;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
    this.draw();
  }

  get gutter() { return this.canvas.clientWidth < 520 ? 62 : 104; }
  get plotWidth() { return Math.max(this.canvas.clientWidth - this.gutter - 4, 40); }
  toTime(x) { return this.from + ((x - this.gutter) / this.plotWidth) * (this.to - this.from); }

  view(from, to) {
    const width = Math.min(Math.max(to - from, NARROWEST_US), this.span_us);
    const centre = (from + to) / 2;
    this.from = Math.min(Math.max(centre - width / 2, this.first_us), this.first_us + this.span_us - width);
    this.to = this.from + width;
    this.tip.hidden = true;
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  zoom(factor, x = this.gutter + this.plotWidth / 2) {
    const fixed = this.toTime(x), width = Math.min(Math.max((this.to - this.from) * factor, NARROWEST_US), this.span_us);
    const share = (fixed - this.from) / (this.to - this.from);
    this.view(fixed - width * share, fixed + width * (1 - share));
  }

  pan(share) { const by = (this.to - this.from) * share; this.view(this.from + by, this.to + by); }
  reset() { this.view(this.first_us, this.first_us + this.span_us); }

  /** The first span that can reach into the view. */
  firstVisible(group) {
    const starts = group.spans.start, from = this.from - group.longest;
    let low = 0, high = starts.length;
    while (low < high) { const middle = (low + high) >> 1; if (starts[middle] < from) low = middle + 1; else high = middle; }
    return low;
  }

  draw() {
    const {canvas} = this, width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(this.height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(this.height * ratio);
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, this.height);
    this.drawAxis(ctx);
    for (const group of this.groups) this.drawGroup(ctx, group);
    this.rangeText.textContent = `${moment(this.from, this.to - this.from)} to ${moment(this.to, this.to - this.from)}, ${duration(this.to - this.from)} wide`;
  }

  drawAxis(ctx) {
    const span = this.to - this.from, room = this.plotWidth / (this.plotWidth < 400 ? 90 : 120);
    const rough = span / room, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
    const decimals = Math.max(0, Math.ceil(-Math.log10(step / 1e6) - 1e-9));
    ctx.font = FONT; ctx.textBaseline = "alphabetic"; ctx.textAlign = "center";
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = this.gutter + ((t - this.from) / span) * this.plotWidth;
      ctx.fillStyle = css("--grid");
      ctx.fillRect(Math.round(x), 0, 1, this.height - AXIS + 4);
      ctx.fillStyle = css("--ink-soft");
      const text = `${(t / 1e6).toFixed(Math.min(decimals, 6))} s`, half = ctx.measureText(text).width / 2;
      ctx.fillText(text, Math.min(Math.max(x, this.gutter + half), this.gutter + this.plotWidth - half), this.height - 6);
    }
    ctx.textAlign = "left";
  }

  drawGroup(ctx, group) {
    const {gutter, plotWidth, from, to} = this, scale = plotWidth / (to - from), {start, stop, lane} = group.spans;
    ctx.fillStyle = css("--ink-soft");
    ctx.font = `600 ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.fillText(group.name, 0, group.top + 9);
    ctx.font = FONT;
    const colours = group.lanes.map((l) => css(l.colour)), inks = colours.map(inkOn);
    group.lanes.forEach((l) => {
      ctx.fillStyle = css("--idle");
      ctx.fillRect(gutter, l.top, plotWidth, LANE);
      ctx.fillStyle = css("--ink");
      ctx.fillText(l.name, 0, l.top + LANE / 2, gutter - 8);
    });
    const columns = Math.ceil(plotWidth);
    const filled = group.lanes.map(() => new Float64Array(columns + 1));
    ctx.save();
    ctx.beginPath(); ctx.rect(gutter, 0, plotWidth, this.height); ctx.clip();
    ctx.textBaseline = "middle";
    for (let i = this.firstVisible(group); i < start.length && start[i] < to; i++) {
      if (stop[i] <= from) continue;
      const left = (start[i] - from) * scale, right = (stop[i] - from) * scale, box = right - left, l = lane[i];
      if (box < 1.5) {
        // Too thin for a box: its pixels are added to the columns that it touches.
        const a = Math.max(left, 0), b = Math.min(right, columns), first = Math.floor(a);
        if (first >= columns) continue;
        const inFirst = Math.min(b, first + 1) - a;
        const share = group.busy ? group.busy[i] : 1;
        filled[l][first] += inFirst * share;
        if (b > first + 1) { filled[l][first + 1] += Math.min(b - first - 1, 1) * share; if (b > first + 2) filled[l][Math.min(first + 2, columns)] += (b - first - 2) * share; }
        continue;
      }
      ctx.fillStyle = colours[l];
      const gap = box > 4 ? 1 : 0;
      const tall = LANE * (group.busy ? Math.max(0.1, group.busy[i]) : 1);
      ctx.fillRect(gutter + left, group.lanes[l].top + LANE - tall, box - gap, tall);
      if (box > 34 && tall > 16) {
        const text = group.caption(i), visible = Math.min(right, plotWidth) - Math.max(left, 0);
        if (ctx.measureText(text).width + 10 < visible) {
          ctx.fillStyle = inks[l];
          ctx.fillText(text, gutter + Math.max(left, 0) + 5, group.lanes[l].top + LANE / 2 + 0.5);
        }
      }
    }
    group.lanes.forEach((l, k) => {
      ctx.fillStyle = colours[k];
      for (let c = 0; c < columns; c++) {
        if (!filled[k][c]) continue;
        const share = Math.max(0.06, Math.min(1, filled[k][c]));
        ctx.fillRect(gutter + c, l.top + LANE * (1 - share), 1, LANE * share);
      }
    });
    ctx.restore();
  }

  /** The span under a point, or the nearest within two pixels of it. */
  at(x, y) {
    const time = this.toTime(x), slack = ((this.to - this.from) / this.plotWidth) * 2;
    for (const group of this.groups) {
      const k = group.lanes.findIndex((l) => y >= l.top - 2 && y <= l.top + LANE + 2);
      if (k < 0) continue;
      let best = -1, distance = slack;
      for (let i = this.firstVisible(group); i < group.spans.start.length && group.spans.start[i] <= time + slack; i++) {
        if (group.spans.lane[i] !== k) continue;
        const away = Math.max(group.spans.start[i] - time, time - group.spans.stop[i], 0);
        if (away <= distance) { best = i; distance = away; }
      }
      return best < 0 ? null : {group, i: best};
    }
    return null;
  }

  showTip(x, y) {
    const hit = this.at(x, y);
    if (!hit) { this.tip.hidden = true; return; }
    const [heading, ...rows] = hit.group.describe(hit.i);
    this.tip.replaceChildren(el("b", "", heading));
    for (const [name, value] of rows) {
      const row = el("div");
      row.append(el("span", "", name), el("span", "", value));
      this.tip.append(row);
    }
    this.tip.hidden = false;
    const right = x + 14 + this.tip.offsetWidth <= this.host.clientWidth;
    this.tip.style.left = `${right ? x + 14 : Math.max(0, x - 14 - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  listen() {
    const {canvas} = this, place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const fingers = new Map();
    canvas.addEventListener("wheel", (event) => {
      // A page scroll that crosses the timeline remains a scroll.
      if (event.timeStamp - Timeline.scrolledAt < 250) { Timeline.scrolledAt = event.timeStamp; return; }
      const [x] = place(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); this.pan(event.deltaX / this.plotWidth); return; }
      const isWhole = this.to - this.from >= this.span_us * 0.9999;
      if (isWhole && event.deltaY > 0) return;
      event.preventDefault();
      this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), Math.max(x, this.gutter));
    }, {passive: false});
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, place(event));
      if (event.pointerType !== "mouse") this.showTip(...place(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event), before = fingers.get(event.pointerId);
      if (!before) { this.showTip(x, y); return; }
      const others = [...fingers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const other = others[0][1][0], was = Math.abs(before[0] - other), now = Math.abs(x - other);
        if (was > 5 && now > 5) this.zoom(was / now, (x + other) / 2);
      } else if (x !== before[0]) {
        this.pan((before[0] - x) / this.plotWidth);
      }
      fingers.set(event.pointerId, [x, y]);
    });
    const release = (event) => fingers.delete(event.pointerId);
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, place(event)[0]));
    canvas.addEventListener("keydown", (event) => {
      const keys = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
        "-": () => this.zoom(2), 0: () => this.reset(), Home: () => this.pan(-1e9), End: () => this.pan(1e9),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}

Timeline.scrolledAt = -1e9;
document.addEventListener("scroll", (event) => { Timeline.scrolledAt = event.timeStamp; }, {passive: true});
