// The charts that uPlot draws: lines and stacks over time, latency distributions, latency against rate.
"use strict";

const DTYPES = {
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array,
};

/** Unpack one column: little-endian numbers in base64; with `delta`, each is the distance from the previous one. */
function unpack(column) {
  const text = atob(column.b64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const raw = new DTYPES[column.dtype](bytes.buffer);
  if (column.first === undefined) return raw;
  const out = new Float64Array(raw.length);
  let sum = column.first;
  for (let i = 0; i < raw.length; i++) { sum += raw[i]; out[i] = sum; }
  return out;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function withAlpha(colour, alpha) {
  const hex = colour.replace("#", "");
  const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;   // text is never parsed as HTML
  return node;
}

// ------------------------------------------------------------------------------------------------------- units

const digits = (value, significant = 3) => {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 10 ** (significant - 1)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(significant)));
};

function duration(us) {
  if (!Number.isFinite(us) || us < 0) return "–";
  if (us < 999.5) return `${digits(us)} µs`;
  if (us < 999.5e3) return `${digits(us / 1e3)} ms`;
  if (us < 119.95e6) return `${digits(us / 1e6)} s`;
  if (us < 119.95 * 60e6) return `${digits(us / 60e6)} min`;
  return `${digits(us / 3600e6)} h`;
}

/** A time in a view `width_us` wide, with enough decimals to distinguish neighbours. */
function moment(us, width_us) {
  const decimals = Math.min(6, Math.max(0, Math.ceil(-Math.log10(Math.max(width_us, 1) / 1e6)) + 2));
  return `${(us / 1e6).toLocaleString("en-US", {minimumFractionDigits: decimals, maximumFractionDigits: decimals})} s`;
}

function compact(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)}G`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 1e4) return `${digits(value / 1e3)}k`;
  return digits(value);
}

/** The unit of a time axis, and its length in microseconds. */
function timeUnit(span_us) {
  if (span_us < 300e6) return ["s", 1e6];
  if (span_us < 3 * 3600e6) return ["min", 60e6];
  return ["h", 3600e6];
}

// ------------------------------------------------------------------------------------------------------- shared parts

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const live = new Set();   // every chart on the page, to be redrawn when the colours change

function axis(extra) {
  return {
    stroke: css("--ink-soft"), font: FONT, labelFont: FONT, labelSize: 20, labelGap: 0,
    grid: {stroke: css("--grid"), width: 1}, ticks: {show: false}, ...extra,
  };
}

/** Add a tooltip that follows the cursor, and arrow keys that move it. `rows(i)` returns [[name, value], ...]. */
function tooltip(host, heading, rows) {
  const tip = el("div", "tip");
  tip.hidden = true;
  tip.setAttribute("role", "status");
  host.append(tip);
  let asked = false;
  function show(u) {
    const i = u.cursor.idx;
    if (!asked || i === null || i === undefined || u.cursor.left < 0) { tip.hidden = true; return; }
    tip.replaceChildren(el("b", "", heading(i)));
    for (const [name, value] of rows(i)) {
      const row = el("div");
      row.append(el("span", "", name), el("span", "", value));
      tip.append(row);
    }
    tip.hidden = false;
    const x = u.over.offsetLeft + u.cursor.left;
    const right = x + 14 + tip.offsetWidth <= host.clientWidth;
    tip.style.left = `${right ? x + 14 : Math.max(0, x - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${u.over.offsetTop + 6}px`;
  }
  host.tabIndex = 0;
  return {
    hooks: {
      setCursor: [show],
      ready: [(u) => {
        u.over.addEventListener("pointerenter", () => { asked = true; });
        u.over.addEventListener("pointerleave", () => { asked = false; tip.hidden = true; });
        host.onkeydown = (event) => {
          const x = u.data[0], low = u.valToIdx(u.scales.x.min), high = u.valToIdx(u.scales.x.max);
          let i = asked && u.cursor.idx !== null && u.cursor.idx !== undefined ? u.cursor.idx : low - 1;
          const stride = Math.max(1, Math.round((high - low) / (event.shiftKey ? 10 : 100)));
          if (event.key === "ArrowRight") i = Math.min(high, i + stride);
          else if (event.key === "ArrowLeft") i = Math.max(low, i - stride);
          else if (event.key === "Home") i = low;
          else if (event.key === "End") i = high;
          else if (event.key === "Escape") { asked = false; tip.hidden = true; return; }
          else return;
          event.preventDefault();
          asked = true;
          u.setCursor({left: u.valToPos(x[i], "x"), top: u.over.clientHeight / 2});
        };
        host.onblur = () => { asked = false; tip.hidden = true; };
      }],
    },
  };
}

/** Put a chart into `host` and keep it as wide as its place. `options()` is called again when the colours change. */
function mount(host, options, data) {
  const chart = {
    host,
    u: null,
    draw() {
      if (this.u) this.u.destroy();
      host.replaceChildren();
      this.u = new uPlot({...options(), width: Math.max(host.clientWidth, 120), height: host.clientHeight}, data(), host);
    },
  };
  chart.draw();
  live.add(chart);
  const observer = new ResizeObserver(() => {
    if (host.clientWidth > 0 && chart.u.width !== host.clientWidth) {
      chart.u.setSize({width: host.clientWidth, height: host.clientHeight});
    }
  });
  observer.observe(host);
  chart.remove = () => { observer.disconnect(); live.delete(chart); chart.u.destroy(); };
  return chart;
}

/** A y range that starts at zero, and is never empty. */
const fromZero = (u, low, high) => [0, high > 0 ? high * 1.08 : 1];

// ------------------------------------------------------------------------------------------------------- over time

/** Lines over time. `lines` is [{name, values, colour, dash, area}]; charts with one `sync` key share cursor and zoom. */
function lineChart(host, times_us, lines, {sync, format = compact, range = fromZero, yTicks = compact}) {
  const [unit, unit_us] = timeUnit(times_us.at(-1) ?? 0);
  const x = Array.from(times_us, (t) => t / unit_us);
  return mount(host, () => ({
    legend: {show: false},
    padding: [10, 10, 0, 0],
    cursor: {sync: {key: sync, scales: ["x", null]}, y: false, points: {size: 7}, drag: {x: true, y: false, dist: 6}},
    scales: {x: {time: false}, y: {range}},
    axes: [
      axis({label: `time since the start (${unit})`, grid: {show: false}, size: 30}),
      axis({size: 46, values: (u, ticks) => ticks.map(yTicks)}),
    ],
    series: [{}, ...lines.map((line) => ({
      label: line.name, stroke: css(line.colour), width: 1.75, points: {show: x.length < 3, size: 6}, dash: line.dash,
      fill: line.area ? withAlpha(css(line.colour), 0.16) : undefined,
    }))],
    plugins: [tooltip(host, (i) => `at ${duration(times_us[i])}`,
      (i) => lines.map((line) => [line.name, format(line.values[i])]))],
  }), () => [x, ...lines.map((line) => Array.from(line.values))]);
}

/** Layers stacked from the bottom up. The tooltip lists them from top to bottom. */
function stackChart(host, times_us, layers, {sync, format = compact, top = null}) {
  const [unit, unit_us] = timeUnit(times_us.at(-1) ?? 0);
  const x = Array.from(times_us, (t) => t / unit_us);
  const sums = [];
  layers.forEach((layer, k) => sums.push(Array.from(layer.values, (v, i) => v + (k ? sums[k - 1][i] : 0))));
  const range = top === null ? fromZero : () => [0, top];
  return mount(host, () => ({
    legend: {show: false},
    padding: [10, 10, 0, 0],
    cursor: {sync: {key: sync, scales: ["x", null]}, y: false, points: {show: false}, drag: {x: true, y: false, dist: 6}},
    scales: {x: {time: false}, y: {range}},
    axes: [
      axis({label: `time since the start (${unit})`, grid: {show: false}, size: 30}),
      axis({size: 46, values: (u, ticks) => ticks.map(compact)}),
    ],
    // Drawn from the highest sum down, each opaque over the previous one.
    series: [{}, ...layers.map((layer) => ({
      label: layer.name, width: 0, fill: css(layer.colour), points: {show: false},
    })).reverse()],
    plugins: [tooltip(host, (i) => `at ${duration(times_us[i])}`,
      (i) => layers.map((layer) => [layer.name, format(layer.values[i])]).reverse())],
  }), () => [x, ...sums.slice().reverse()]);
}

// ------------------------------------------------------------------------------------------------------- latencies

/** Ticks for a logarithmic axis whose values were replaced by their logarithms: 1, 2 and 5 of each decade. */
function logTicks(low, high, most) {
  let ticks = [];
  for (let decade = Math.floor(low); decade <= Math.ceil(high); decade++) {
    for (const k of [1, 2, 5]) ticks.push(decade + Math.log10(k));
  }
  ticks = ticks.filter((tick) => tick >= low && tick <= high);
  if (ticks.length > most) {
    const tens = ticks.filter((tick) => Math.abs(tick - Math.round(tick)) < 1e-9);
    if (tens.length >= 2) return tens;
  }
  if (ticks.length >= 2) return ticks;
  // Less than one octave: round numbers in even steps.
  const from = 10 ** low, to = 10 ** high, power = 10 ** Math.floor(Math.log10((to - from) / 3));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= (to - from) / 3.5);
  const even = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) even.push(Math.log10(k * step));
  return even;
}

/** Times in µs become milliseconds or seconds for a linear axis, so that its ticks are round numbers. */
function latencyUnit(longest_us) {
  if (longest_us < 2000) return ["µs", 1];
  if (longest_us < 2e6) return ["ms", 1e3];
  if (longest_us < 600e6) return ["s", 1e6];
  return ["min", 60e6];
}

/** Share of requests at or below each latency, with its percentiles and SLO marked. */
function cdfChart(host, cdf, isLog) {
  const shares = cdf.share.map((share) => share * 100);
  const longest_us = Math.max(cdf.x_us.at(-1), ...(cdf.slo ? [cdf.slo.limit_us] : []), 1);
  const [unit, unit_us] = latencyUnit(longest_us);
  const place = isLog ? (us) => Math.log10(Math.max(us, 1)) : (us) => us / unit_us;
  const x = cdf.x_us.map(place);
  const stops = cdf.slo ? [...x, place(cdf.slo.limit_us)] : x;
  let low = isLog ? Math.min(...stops) : 0, high = Math.max(...stops);
  if (isLog && high - low < 0.3) { low -= 0.15; high += 0.15; }
  const margin = (high - low || high || 1) * 0.04;
  const range = [isLog ? low - margin : 0, high + margin];

  function marks(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.font = `${12 * ratio}px ${FONT.slice(5)}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const write = (text, at, y, colour) => {
      const width = ctx.measureText(text).width, right = at + 5 * ratio + width <= bbox.left + bbox.width;
      const left = right ? at + 5 * ratio : at - 5 * ratio - width;
      ctx.fillStyle = css("--card");
      ctx.globalAlpha = 0.85;
      ctx.fillRect(left - 2 * ratio, y - 8 * ratio, width + 4 * ratio, 16 * ratio);
      ctx.globalAlpha = 1;
      ctx.fillStyle = colour;
      ctx.fillText(text, left, y);
    };
    // Lines first, text over them.
    const words = [];
    cdf.marks.forEach(([name, us], k) => {
      const at = Math.round(u.valToPos(place(us), "x", true));
      const y = u.valToPos({p50: 50, p90: 90, p99: 99}[name], "y", true);
      ctx.strokeStyle = css("--ink-soft");
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath(); ctx.moveTo(at, y); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = css("--decode");
      ctx.beginPath(); ctx.arc(at, y, 3.5 * ratio, 0, 7); ctx.fill();
      words.push([`${name}  ${duration(us)}`, at, bbox.top + bbox.height * (0.76 - 0.22 * k), css("--ink")]);
    });
    if (cdf.slo) {
      const at = Math.round(u.valToPos(place(cdf.slo.limit_us), "x", true));
      ctx.strokeStyle = css("--bad");
      ctx.lineWidth = 1.75 * ratio;
      ctx.setLineDash([1.5 * ratio, 3.5 * ratio]);
      ctx.lineCap = "round";
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
      words.push([cdf.slo.label, at, bbox.top + bbox.height * 0.92, css("--bad")]);
    }
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    for (const word of words) if (word[1] >= bbox.left && word[1] <= bbox.left + bbox.width) write(...word);
    ctx.restore();
  }

  const ticks = isLog
    ? {splits: (u) => logTicks(u.scales.x.min, u.scales.x.max, u.width / 75), values: (u, at) => at.map((v) => duration(10 ** v))}
    : {values: (u, at) => at.map((v) => digits(v, 4)), space: 60};
  return mount(host, () => ({
    legend: {show: false},
    padding: [10, 16, 0, 0],
    cursor: {y: false, points: {size: 7}, drag: {x: true, y: false, dist: 6}},
    scales: {x: {time: false, range: (u, a, b) => (a > x[0] || b < x.at(-1) ? [a, b] : range)}, y: {range: [0, 104]}},
    axes: [
      axis({label: `${cdf.name}${isLog ? ", log scale" : ` (${unit})`}`, size: 30, ...ticks}),
      axis({size: 46, splits: () => [0, 25, 50, 75, 100], values: (u, at) => at.map((v) => `${v} %`)}),
    ],
    series: [{}, {
      stroke: css("--decode"), width: 2, fill: withAlpha(css("--decode"), 0.1), points: {show: false},
      paths: uPlot.paths.stepped({align: 1}),
    }],
    plugins: [
      tooltip(host, (i) => `${digits(shares[i], 4)} % of requests`, (i) => [["took at most", duration(cdf.x_us[i])]]),
      {hooks: {draw: [marks]}},
    ],
  }), () => [x, shares]);
}

/** Points: time to first token against prompt length, both as logarithms. */
function scatterChart(host, scatter) {
  const order = Array.from(scatter.prompt_tokens.keys()).sort((a, b) => scatter.prompt_tokens[a] - scatter.prompt_tokens[b]);
  const prompts = order.map((i) => scatter.prompt_tokens[i]), ttfts = order.map((i) => scatter.ttft_us[i]);
  const x = prompts.map((tokens) => Math.log10(Math.max(tokens, 1))), y = ttfts.map((us) => Math.log10(Math.max(us, 1)));
  const padded = (u, low, high) => (high - low < 0.3 ? [low - 0.2, high + 0.2] : [low - 0.04 * (high - low), high + 0.04 * (high - low)]);
  const points = (u) => {
    const {ctx} = u, ratio = devicePixelRatio || 1, radius = (x.length > 800 ? 2 : 3) * ratio;
    ctx.save();
    ctx.beginPath(); ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); ctx.clip();
    ctx.fillStyle = withAlpha(css("--decode"), x.length > 800 ? 0.35 : 0.55);
    for (let i = 0; i < x.length; i++) {
      ctx.beginPath(); ctx.arc(u.valToPos(x[i], "x", true), u.valToPos(y[i], "y", true), radius, 0, 7); ctx.fill();
    }
    ctx.restore();
  };
  return mount(host, () => ({
    legend: {show: false},
    padding: [8, 12, 0, 0],
    cursor: {y: false, points: {size: 9}, drag: {x: true, y: false, dist: 6}},
    scales: {x: {time: false, range: padded}, y: {range: padded}},
    axes: [
      axis({label: "prompt (tokens), log scale", size: 30, splits: (u) => logTicks(u.scales.x.min, u.scales.x.max, u.width / 60),
        values: (u, at) => at.map((v) => compact(10 ** v))}),
      axis({size: 58, splits: (u) => logTicks(u.scales.y.min, u.scales.y.max, u.height / 26), values: (u, at) => at.map((v) => duration(10 ** v))}),
    ],
    series: [{}, {stroke: css("--decode"), width: 0, paths: () => null, points: {show: false}}],
    plugins: [
      tooltip(host, (i) => `prompt of ${prompts[i].toLocaleString("en-US")} tokens`, (i) => [["first token after", duration(ttfts[i])]]),
      {hooks: {draw: [points]}},
    ],
  }), () => [x, y]);
}

// ------------------------------------------------------------------------------------------------------- across runs

/** The value of a line at `at`, interpolated between its points, constant beyond them. Null without points. */
function valueAt(x, values, at) {
  const i = x.findIndex((stop) => stop >= at);
  if (i <= 0) return values[i === 0 ? 0 : values.length - 1];
  if (values[i - 1] === null || values[i] === null) return values[i - 1] ?? values[i];
  return values[i - 1] + ((values[i] - values[i - 1]) * (at - x[i - 1])) / (x[i] - x[i - 1]);
}

/** One value per run against its rate, with the SLO as a dotted line; runs without a common rate are points apart. */
function compareChart(host, compare, chart) {
  const isLog = chart.kind === "latency" && (() => {
    const all = chart.lines.flatMap((line) => line.values).filter((v) => v !== null && v > 0);
    return all.length > 0 && Math.max(...all) / Math.min(...all) > 20;
  })();
  const isLatency = chart.kind === "latency";
  const ends = chart.lines.flatMap((line) => (line.intervals ?? []).flatMap((interval) => interval ?? []));
  const longest_us = Math.max(1, chart.limit_us ?? 1, ...ends, ...chart.lines.flatMap((line) => line.values.map((v) => v ?? 0)));
  const [unit, unit_us] = isLatency ? latencyUnit(longest_us) : [chart.unit, 1];
  const place = (v) => (v === null ? null : isLog ? Math.log10(Math.max(v, 1)) : v / unit_us);
  const show = isLatency ? duration : (v) => `${digits(v)} ${chart.unit}`;
  const x = compare.rates;
  const pad = compare.names ? 0.6 : Math.max((x.at(-1) - x[0]) * 0.05, x.at(-1) * 0.02, 0.01);
  const limit = chart.limit_us ? place(chart.limit_us) : null;
  function range(u, low, high) {
    const others = [...(limit === null ? [] : [limit]), ...ends.map(place)];
    const top = Math.max(high, ...others), bottom = Math.min(low, ...others);
    if (!isLog) return fromZero(u, 0, top);
    return [bottom - 0.12, top + 0.12];
  }
  const whiskers = (u) => {
    const {ctx} = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.lineWidth = 1.5 * ratio;
    chart.lines.forEach((line, k) => {
      ctx.strokeStyle = ctx.fillStyle = css(line.colour);
      // Separate points leave room for their values beside each other.
      const aside = compare.names ? (k - (chart.lines.length - 1) / 2) * 16 * ratio : 0, cap = 4 * ratio;
      line.values.forEach((value, i) => {
        const interval = line.intervals?.[i], at = u.valToPos(x[i], "x", true) + aside;
        if (interval) {
          const [low, high] = interval.map((v) => u.valToPos(place(v), "y", true));
          ctx.beginPath();
          ctx.moveTo(at, low); ctx.lineTo(at, high);
          for (const end of [low, high]) { ctx.moveTo(at - cap, end); ctx.lineTo(at + cap, end); }
          ctx.stroke();
        }
        if (compare.names && value !== null) {
          ctx.beginPath(); ctx.arc(at, u.valToPos(place(value), "y", true), 4.5 * ratio, 0, 7); ctx.fill();
        }
      });
    });
    ctx.restore();
  };
  const slo = (u) => {
    if (limit === null) return;
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1, at = u.valToPos(limit, "y", true);
    ctx.save();
    ctx.strokeStyle = css("--bad"); ctx.lineWidth = 1.75 * ratio; ctx.lineCap = "round"; ctx.setLineDash([1.5 * ratio, 3.5 * ratio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, at); ctx.lineTo(bbox.left + bbox.width, at); ctx.stroke();
    ctx.font = `${12 * ratio}px ${FONT.slice(5)}`; ctx.fillStyle = css("--bad");
    ctx.textBaseline = "bottom"; ctx.textAlign = "left";
    // Labels go to the end that is free of lines. A line is in the way if it is nearer than the height of the text.
    const width = ctx.measureText(chart.limit_label).width, near = (bbox.width ? (width + 12 * ratio) / bbox.width : 1) * (u.scales.x.max - u.scales.x.min);
    const room = (from, to) => {
      let least = Infinity;
      for (const line of chart.lines) {
        for (let i = 0; i < 24; i++) {
          const v = valueAt(x, line.values, from + ((to - from) * i) / 23);
          if (v !== null) least = Math.min(least, Math.abs(u.valToPos(place(v), "y", true) - (at - 11 * ratio)));
        }
      }
      return least;
    };
    const {min, max} = u.scales.x;
    const isLeft = room(min, min + near) >= room(max - near, max);
    const left = isLeft ? bbox.left + 6 * ratio : bbox.left + bbox.width - width - 2 * ratio;
    ctx.globalAlpha = 0.85;
    ctx.fillStyle = css("--card");
    ctx.fillRect(left - 2 * ratio, at - 19 * ratio, width + 4 * ratio, 15 * ratio);
    ctx.globalAlpha = 1;
    ctx.fillStyle = css("--bad");
    ctx.fillText(chart.limit_label, left, at - 4 * ratio);
    ctx.restore();
  };
  const yAxis = isLog
    ? {size: 58, splits: (u) => logTicks(u.scales.y.min, u.scales.y.max, u.height / 26), values: (u, at) => at.map((v) => duration(10 ** v))}
    : {size: 58, values: (u, at) => at.map((v) => (isLatency ? `${digits(v)} ${v === 0 ? "" : unit}`.trim() : compact(v)))};
  return mount(host, () => ({
    legend: {show: false},
    padding: [10, 12, 0, 0],
    cursor: {y: false, points: {show: !compare.names, size: 8}, drag: {x: false, y: false}},
    scales: {x: {time: false, range: [x[0] - pad, x.at(-1) + pad]}, y: {range}},
    axes: [axis({label: compare.x_label, size: 30, grid: {show: false}, ...(compare.names
      ? {splits: () => x, values: (u) => compare.names.map((name) => shortened(name, u.width / (x.length + 0.5)))} : {})}), axis(yAxis)],
    series: [{}, ...chart.lines.map((line) => ({
      label: line.name, stroke: css(line.colour), width: compare.names ? 0 : 2, dash: line.dash, spanGaps: true,
      points: {show: !compare.names, size: 7, fill: css(line.colour)},
      ...(compare.names ? {paths: () => null} : {}),
    }))],
    plugins: [
      tooltip(host, (i) => compare.headings[i], (i) => chart.lines.map((line) => {
        const interval = line.intervals?.[i];
        return [line.name, line.values[i] === null ? "–" : show(line.values[i]) + (interval ? `, ${show(interval[0])} to ${show(interval[1])}` : "")];
      })),
      {hooks: {draw: [whiskers, slo]}},
    ],
  }), () => [x, ...chart.lines.map((line) => line.values.map(place))]);
}

/** As much of a name as fits `width` CSS pixels. The end of the name is kept, because names of runs differ there. */
function shortened(name, width) {
  const most = Math.max(2, Math.floor(width / 7));
  return name.length <= most ? name : `…${name.slice(name.length - most + 1)}`;
}

/** Distributions of several runs in one chart; or of each request's time over its time in the first run. */
function overlayChart(host, overlay, isLog) {
  const isRatio = Boolean(overlay.is_ratio), log = isLog || isRatio;
  const stops = [...overlay.x, ...(overlay.slo ? [overlay.slo.limit_us] : []), ...(isRatio ? [1] : [])].filter((v) => v > 0);
  const [unit, unit_us] = isRatio ? ["x", 1] : latencyUnit(Math.max(1, ...stops));
  const least = isRatio ? Math.min(...stops) : 1;
  const place = log ? (v) => Math.log10(Math.max(v, least)) : (v) => v / unit_us;
  const x = overlay.x.map(place);
  const all = stops.map(place);
  let low = log ? Math.min(...all) : 0, high = Math.max(...all);
  if (log && high - low < 0.02) { low -= 0.15; high += 0.15; }
  const margin = (high - low || 1) * 0.04, range = [log ? low - margin : 0, high + margin];
  const times = (v) => `${digits(v)}x`, show = isRatio ? times : duration;
  const mark = isRatio ? 1 : overlay.slo?.limit_us, label = isRatio ? "the same" : overlay.slo?.label;
  const marks = (u) => {
    if (mark === undefined) return;
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1, at = Math.round(u.valToPos(place(mark), "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css(isRatio ? "--ink-soft" : "--bad");
    ctx.lineWidth = 1.5 * ratio; ctx.setLineDash([1.5 * ratio, 3.5 * ratio]); ctx.lineCap = "round";
    ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    ctx.font = `${12 * ratio}px ${FONT.slice(5)}`; ctx.textBaseline = "bottom"; ctx.textAlign = "left";
    const width = ctx.measureText(label).width, isRight = at + 8 * ratio + width <= bbox.left + bbox.width;
    const left = isRight ? at + 5 * ratio : at - 5 * ratio - width, bottom = bbox.top + bbox.height - 4 * ratio, ink = ctx.fillStyle;
    ctx.globalAlpha = 0.85; ctx.fillStyle = css("--card");
    ctx.fillRect(left - 2 * ratio, bottom - 15 * ratio, width + 4 * ratio, 16 * ratio);
    ctx.globalAlpha = 1; ctx.fillStyle = ink;
    ctx.fillText(label, left, bottom);
    ctx.restore();
  };
  const ticks = log
    ? {splits: (u) => logTicks(u.scales.x.min, u.scales.x.max, u.width / 75), values: (u, at) => at.map((v) => show(10 ** v)), space: 50}
    : {values: (u, at) => at.map((v) => digits(v, 4)), space: 60};
  return mount(host, () => ({
    legend: {show: false},
    padding: [10, 16, 0, 0],
    cursor: {y: false, points: {size: 7}, drag: {x: true, y: false, dist: 6}},
    scales: {x: {time: false, range: (u, a, b) => (a > x[0] || b < x.at(-1) ? [a, b] : range)}, y: {range: [0, 104]}},
    axes: [
      axis({label: `${overlay.label}${isRatio ? "" : log ? ", log scale" : ` (${unit})`}`, size: 30, ...ticks}),
      axis({size: 46, splits: () => [0, 25, 50, 75, 100], values: (u, at) => at.map((v) => `${v} %`)}),
    ],
    series: [{}, ...overlay.lines.map((line) => ({
      label: line.name, stroke: css(line.colour), width: 2, dash: line.dash, points: {show: false}, paths: uPlot.paths.stepped({align: 1}),
    }))],
    plugins: [
      tooltip(host, (i) => `at most ${show(overlay.x[i])}`, (i) => overlay.lines.map((line) => [line.name, `${digits(100 * line.share[i], 4)} %`])),
      {hooks: {draw: [marks]}},
    ],
  }), () => [x, ...overlay.lines.map((line) => line.share.map((share) => 100 * share))]);
}
