// Puts the charts into their places on the page: <div class="plot" data-chart="...">.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);

const places = (root) => Object.fromEntries(Array.from(root.querySelectorAll("[data-chart]"), (host) => [host.dataset.chart, host]));

const MODE_COLOURS = {extend: "--prefill", split_prefill: "--prefill", decode: "--decode", verify: "--decode", mixed: "--mixed"};
const CPU_COLOURS = ["--decode", "--other", "--prefill", "--mixed"];

/** Draw everything of one run. Called once, when the run is first shown: a hidden place has no width. */
function drawRun(section, run, key) {
  const at = places(section), sync = `run-${key}`;
  const series = Object.fromEntries(Object.entries(run.series).map(([name, column]) => [name, unpack(column)]));

  for (const [name, cdf] of Object.entries(run.latencies)) {
    const host = at[name];
    if (!host) continue;
    let chart = cdfChart(host, cdf, true);
    section.querySelector("[data-log]")?.addEventListener("change", (event) => {
      chart.remove();
      chart = cdfChart(host, cdf, event.target.checked);
    });
  }
  if (at.scatter) scatterChart(at.scatter, {prompt_tokens: unpack(run.scatter.prompt_tokens), ttft_us: unpack(run.scatter.ttft_us)});

  if (at.load) {
    lineChart(at.load, series.t_us, [
      {name: "running", values: series.running, colour: "--decode", area: true},
      {name: "waiting", values: series.waiting, colour: "--prefill", dash: [6, 4]},
    ], {sync, format: (v) => `${compact(v)} requests`});
  }
  if (at.kv) {
    const layers = [
      {name: "held by requests", values: series.kv_used_pages, colour: "--used"},
      {name: "cached, not in use", values: series.kv_cached_pages, colour: "--cached"},
    ];
    const total = run.kv_pages;
    if (total) layers.push({name: "free", colour: "--free", values: series.kv_used_pages.map((v, i) => Math.max(0, total - v - series.kv_cached_pages[i]))});
    stackChart(at.kv, series.t_us, layers, {
      sync, top: total || null, format: (v) => (total ? `${compact(v)} pages, ${digits((100 * v) / total)} %` : `${compact(v)} pages`),
    });
  }
  const rates = Object.fromEntries(Object.entries(run.rates).map(([name, column]) => [name, unpack(column)]));
  const perSecond = (v) => `${compact(v)} tokens/s`;
  if (at.tokens) {
    stackChart(at.tokens, rates.t_us, [
      {name: "decode", values: rates.decode_per_s, colour: "--decode"},
      {name: "prefill", values: rates.prefill_per_s, colour: "--prefill"},
    ], {sync, format: perSecond});
  }
  if (at.output) {
    lineChart(at.output, rates.t_us, [{name: "output", values: rates.output_per_s, colour: "--decode", area: true}], {sync, format: perSecond});
  }
  if (at.gpu) {
    const percent = series.gpu_busy_fraction.map((v) => 100 * v);
    lineChart(at.gpu, series.t_us, [{name: "GPU busy", values: percent, colour: "--decode", area: true}],
      {sync, format: (v) => `${digits(v)} %`, range: () => [0, 104], yTicks: (v) => `${v} %`});
  }
  if (at.timeline) drawTimeline(at.timeline, run);
}

/** The span from the first arrival or work to the last event of any kind. */
function timelineBounds(run, groups) {
  let [from, to] = run.span_us;
  for (const {spans} of groups) {
    from = Math.min(from, spans.start[0]);
    for (const stop of spans.stop) if (stop > to) to = stop;
  }
  return [from, to];
}

function drawTimeline(host, run) {
  const {gpu, cpu} = run.timeline, groups = [];
  const unpacked = (table) => {
    const columns = Object.fromEntries(Object.entries(table.columns).map(([name, column]) => [name, unpack(column)]));
    return {...columns, stop: Float64Array.from(columns.start, (start, i) => start + columns.length[i])};
  };
  if (cpu) {
    const spans = unpacked(cpu);
    groups.push({
      name: "CPU", spans, busy: spans.busy && Float64Array.from(spans.busy, (v) => v / 255),
      lanes: cpu.lanes.map((name, k) => ({name, colour: CPU_COLOURS[k % CPU_COLOURS.length]})),
      caption: (i) => (spans.count && spans.count[i] > 1 ? `× ${spans.count[i]}` : duration(spans.length[i])),
      describe: (i) => {
        const count = spans.count ? spans.count[i] : 1, lane = cpu.lanes[spans.lane[i]];
        return [count > 1 ? `${lane}, ${count} times` : lane, ["started", moment(spans.start[i], aroundSpan(spans.length[i]))],
          [count > 1 ? "from first to last" : "took", duration(spans.length[i])]];
      },
    });
  }
  if (gpu) {
    const spans = unpacked(gpu), number = (v) => v.toLocaleString("en-US");
    groups.push({
      name: "GPU", spans, busy: spans.busy && Float64Array.from(spans.busy, (v) => v / 255),
      lanes: gpu.lanes.map((name) => ({name: name.replaceAll("_", " "), colour: MODE_COLOURS[name] ?? "--other"})),
      caption: (i) => (spans.count && spans.count[i] > 1 ? `${spans.count[i]} batches` : `b${spans.batch_id[i]}`),
      describe: (i) => {
        const count = spans.count ? spans.count[i] : 1, lane = gpu.lanes[spans.lane[i]].replaceAll("_", " ");
        const times = [
          ["started", moment(spans.start[i], aroundSpan(spans.length[i]))],
          [count > 1 ? "from first to last" : "took", duration(spans.length[i])],
        ];
        if (count > 1) {
          return [`${count} ${lane} batches from b${spans.batch_id[i]}`, ...times,
            ["GPU busy in it", `${digits((100 * spans.busy[i]) / 255)} %`], ["requests, on average", digits(spans.rows[i])],
            ["new tokens, in all", number(spans.new_tokens[i])], ["KV read, at most", `${number(spans.kv_tokens[i])} tokens`]];
        }
        return [`b${spans.batch_id[i]} ${lane}`, ...times, ["launched before it", duration(spans.waited[i])],
          ["requests", number(spans.rows[i])], ["new tokens", number(spans.new_tokens[i])], ["KV read", `${number(spans.kv_tokens[i])} tokens`]];
      },
    });
  }
  const figure = host.closest("figure");
  const timeline = new Timeline(host, groups, timelineBounds(run, groups), figure.querySelector("[data-range]"));
  const acts = {
    in: () => timeline.zoom(0.4), out: () => timeline.zoom(2.5), left: () => timeline.pan(-0.4), right: () => timeline.pan(0.4),
    reset: () => timeline.reset(),
    close: () => { const middle = (timeline.from + timeline.to) / 2; timeline.view(middle - 1e5, middle + 1e5); },
  };
  for (const button of figure.querySelectorAll("button[data-act]")) button.addEventListener("click", acts[button.dataset.act]);
  live.add(timeline);
}

/** Decimals for the start of a span: two more than its length needs, so that neighbours differ. */
const aroundSpan = (length_us) => Math.max(1, length_us * 10);

// ------------------------------------------------------------------------------------------------------- the page

const drawn = new Set();
const sections = Array.from(document.querySelectorAll(".run"));

function showRun(key) {
  sections.forEach((section, k) => { section.hidden = k !== key; });
  if (!drawn.has(key)) { drawn.add(key); drawRun(sections[key], page.runs[key], key); }
}

if (page.compare) {
  const at = places(document.getElementById("compare"));
  for (const chart of page.compare.charts) if (at[chart.name]) compareChart(at[chart.name], page.compare, chart);
}

for (const overlay of page.overlays ?? []) {
  const host = document.querySelector(`[data-chart="${overlay.chart}"]`);
  if (!host) continue;
  let chart = overlayChart(host, overlay, true);
  if (overlay.is_ratio) continue;
  host.closest("section").querySelector("[data-log]").addEventListener("change", (event) => {
    chart.remove();
    chart = overlayChart(host, overlay, event.target.checked);
  });
}

const radios = Array.from(document.querySelectorAll("input[name=run]"));
radios.forEach((radio, key) => radio.addEventListener("change", () => showRun(key)));
for (const link of document.querySelectorAll("a[data-run]")) {
  link.addEventListener("click", () => { radios[Number(link.dataset.run)].checked = true; showRun(Number(link.dataset.run)); });
}
const asked = sections.findIndex((section) => `#${section.id}` === location.hash);
const first = asked >= 0 ? asked : page.first;
if (radios[first]) radios[first].checked = true;
if (sections.length) showRun(first);

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("pre").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of live) chart.draw(); });

/** Draw every chart for paper, or for the screen again: the width of its place and the colours change at once. */
function setPaper(on) {
  document.documentElement.classList.toggle("paper", on);
  for (const chart of live) chart.draw();
}
addEventListener("beforeprint", () => setPaper(true));
addEventListener("afterprint", () => setPaper(false));
