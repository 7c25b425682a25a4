"use strict";
// The page: its settings (axis, smoothing, zoom, runs, colours), the controls that change them, and the charts.

const SPANS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

class Page {
  constructor(data) {
    this.data = data;
    this.unpacked = new Map();
    this.known = null; // cached result of end()
    this.view = { axis: data.axes[0], span: 0, isFull: false, range: null, hidden: new Set(), pointed: null };
    this.tip = new Tip(this);
    this.charts = data.metrics.map((metric, i) => new Chart(metric, document.getElementById(`metric-${i}`), this));
    const controls = document.getElementById("controls");
    this.controls(controls.elements);
    this.legend();
    this.dye();
    const charts = new Map(this.charts.flatMap(chart => [[chart.figure, chart], [chart.box, chart]]));
    const seen = new IntersectionObserver(entries => {
      for (const { target, isIntersecting } of entries) {
        const chart = charts.get(target);
        chart.isSeen = isIntersecting;
        if (isIntersecting && chart.isStale) chart.draw();
        if (isIntersecting) chart.resize();
      }
    }, { rootMargin: "400px" });
    const sized = new ResizeObserver(entries => entries.forEach(({ target }) => charts.get(target).resize()));
    for (const { figure, box } of this.charts) { seen.observe(figure); sized.observe(box); }
  }

  values(text) {
    if (!this.unpacked.has(text)) this.unpacked.set(text, unpacked(text));
    return this.unpacked.get(text);
  }

  // The x values of a line on an axis. Lines with equal x values share one array.
  column(line, axis) {
    const number = line.places[axis];
    if (number === null) return null;
    const packed = this.data.columns[number];
    if (!this.unpacked.has(number)) this.unpacked.set(number, unpacked(packed, "f8"));
    return this.unpacked.get(number);
  }

  // The largest x value of all visible runs.
  end() {
    if (this.known === null) {
      let end = 0;
      for (const { lines } of this.data.metrics)
        for (const line of lines)
          if (!this.view.hidden.has(line.run)) end = Math.max(end, this.column(line, this.view.axis)?.at(-1) ?? 0);
      this.known = end || 1;
    }
    return this.known;
  }

  range() { return this.view.range ?? [0, this.end()]; }

  zoom(range) {
    if (range) {
      const end = this.end();
      range = [Math.max(0, range[0]), Math.min(end, range[1])];
      if (range[1] - range[0] < 1e-6 * end) return;
      if (range[0] === 0 && range[1] === end) range = null;
    }
    this.view.range = range;
    document.getElementById("reset").disabled = range === null;
    this.tip.hide();
    this.charts.forEach(chart => chart.rezoom());
  }

  draw() {
    this.tip.hide();
    this.charts.forEach(chart => chart.draw());
  }

  axisLabel() {
    const { axis } = this.view;
    return axis === "seconds" ? `time of training (${this.unit()[1]})` : axis === "steps" ? "step" : "tokens";
  }

  // The unit of the numbers along the x axis: [size, name].
  unit() {
    const units = { seconds: [[86400, "days"], [3600, "hours"], [60, "minutes"]], tokens: [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]], steps: [] };
    const least = this.view.axis === "seconds" ? 2 : 1;
    return units[this.view.axis].find(([size]) => this.range()[1] >= least * size) ?? [1, this.view.axis === "seconds" ? "seconds" : ""];
  }

  tick(v, step) {
    const [size, name] = this.unit();
    return tickText(v / size, step / size) + (this.view.axis === "tokens" && v ? name : "");
  }

  // The permitted distances between ticks: round multiples of the unit.
  tickSteps() {
    const [size] = this.unit(), least = this.view.axis === "seconds" ? -3 : -Math.round(Math.log10(size));
    return Array.from({ length: 16 }, (_, i) => i + least).flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power * size));
  }

  // The colour of a run's line, with opacity `alpha` (hex). While one run is pointed at, others are almost transparent.
  colour(run, alpha = "") {
    const colours = this.data.colours[this.isDark() ? "dark" : "light"], { pointed } = this.view;
    return colours[run % colours.length] + (pointed === null || pointed === run ? alpha : alpha ? "08" : "30");
  }

  // The width of a run's line. With few runs earlier lines are wider, so that equal lines do not hide each other.
  width(run) {
    const { length } = this.data.runs;
    return 2 + (length <= 4 ? length - 1 - run : 0);
  }

  dash(run) { return this.data.dashes[Math.floor(run / this.data.colours.light.length) % this.data.dashes.length]; }

  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  // Read the colours of the page for the canvases, to which style sheets do not apply.
  dye() {
    const style = getComputedStyle(document.getElementById("ink"));
    this.ink = { text: style.color, grid: style.borderTopColor, band: style.backgroundColor };
    const button = document.getElementById("theme");
    button.textContent = this.isDark() ? "Light" : "Dark";
    this.redraw();
  }

  redraw() { for (const { plot } of this.charts) plot?.redraw(false, true); }

  controls({ axis, smoothing, limits }) {
    const longest = Math.max(0, ...this.data.metrics.flatMap(({ lines }) => lines.map(line => line.size * this.column(line, "steps").length)));
    const steps = Math.max(0, ...this.data.metrics.flatMap(({ lines }) => lines.map(line => this.column(line, "steps").at(-1))));
    smoothing.max = Math.max(1, SPANS.filter(span => span <= steps / 4).length - 1);
    smoothing.value = longest < 200 ? 0 : SPANS.findLastIndex(span => span <= steps / 100);
    const smooth = () => {
      this.view.span = SPANS[smoothing.value];
      const text = this.view.span ? `over ${this.view.span.toLocaleString("en")} steps` : "off";
      document.getElementById("span").textContent = text;
      smoothing.setAttribute("aria-valuetext", text);
    };
    smooth();
    smoothing.addEventListener("input", () => { smooth(); this.draw(); });
    axis.forEach(radio => radio.addEventListener("change", () => {
      this.view.axis = radio.value;
      this.known = null;
      this.zoom(null);
      this.draw();
    }));
    limits.forEach(radio => radio.addEventListener("change", () => { this.view.isFull = radio.value === "full"; this.draw(); }));
    document.getElementById("reset").addEventListener("click", () => this.zoom(null));
    document.getElementById("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = this.isDark() ? "light" : "dark";
      this.dye();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.dye());
    document.getElementById("find")?.addEventListener("input", event => {
      const word = event.target.value.toLowerCase();
      for (const { metric, figure } of this.charts) figure.hidden = !`${metric.name} ${metric.label}`.toLowerCase().includes(word);
      for (const group of document.querySelectorAll("details.group")) {
        const found = group.querySelector("figure:not([hidden])") !== null;
        group.hidden = !found;
        if (word && found) group.open = true;
      }
    });
  }

  legend() {
    const buttons = [...document.querySelectorAll("#legend button[data-run]")], { hidden } = this.view;
    const toggle = runs => {
      for (const run of runs) if (!hidden.delete(run)) hidden.add(run);
      this.known = null;
      buttons.forEach(button => button.setAttribute("aria-pressed", !hidden.has(+button.dataset.run)));
      this.draw();
    };
    const point = run => { this.view.pointed = run; this.redraw(); };
    for (const button of buttons) {
      const run = +button.dataset.run;
      button.addEventListener("pointerenter", () => point(run));
      button.addEventListener("focus", () => button.matches(":focus-visible") && point(run));
      for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => point(null));
    }
    const runs = buttons.map(button => +button.dataset.run);
    buttons.forEach(button => button.addEventListener("click", () => toggle([+button.dataset.run])));
    document.getElementById("all")?.addEventListener("click", () => toggle([...hidden]));
    document.getElementById("none")?.addEventListener("click", () => toggle(runs.filter(run => !hidden.has(run))));
  }
}

// The box beside the cursor that shows the values of all runs at its x position.
class Tip {
  constructor(page) {
    this.page = page;
    this.box = document.getElementById("tip");
  }

  hide() { this.box.hidden = true; }

  show(chart, at, left, around) {
    const { page, box } = this, { axis } = page.view, rows = [];
    let place = "";
    for (const { line, x, main, values, low, high, isSmoothed } of chart.drawn) {
      const i = nearest(x, at), gap = Math.abs(x[i] - at);
      const isBeyond = x.length === 0 || gap > 0.02 * (page.range()[1] - page.range()[0]) && (at < x[0] || at > x.at(-1));
      if (!place && !isBeyond) place = this.place(line, i);
      const texts = isBeyond ? ["–"] : [written(main[i])];
      if (!isBeyond && isSmoothed) texts.push(written(values[i]));
      if (!isBeyond && low) texts.push(`${written(low[i])} … ${written(high[i])}`);
      rows.push([line.run, texts]);
    }
    const width = Math.max(1, ...rows.map(([, texts]) => texts.length)), first = chart.drawn[0];
    const heads = first ? ["value", ...(first.isSmoothed ? ["unsmoothed"] : []), ...(first.low ? ["least … greatest"] : [])] : [];
    if (first?.isSmoothed) heads[0] = "smoothed";
    const table = document.createElement("table"), head = table.createTHead().insertRow();
    for (const text of [place || "no value here", ...heads.slice(0, width)]) {
      const cell = document.createElement("th");
      cell.textContent = text;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const [run, texts] of rows) {
      const row = body.insertRow(), name = row.insertCell();
      const button = document.querySelector(`#legend button[data-run="${run}"]`);
      name.append(...["svg", "bdi"].map(part => button.querySelector(part).cloneNode(true)));
      for (let i = 0; i < width; i++) row.insertCell().textContent = texts[i] ?? "";
    }
    box.replaceChildren(table);
    box.hidden = false;
    const room = document.documentElement.clientWidth, size = box.getBoundingClientRect();
    const beside = left + 16 + size.width < room ? left + 16 : left - 16 - size.width;
    box.style.left = `${Math.max(4, beside)}px`;
    box.style.top = `${Math.max(4, Math.min(around.top + 8, innerHeight - size.height - 4))}px`;
  }

  place(line, i) {
    const { page } = this, steps = page.column(line, "steps")[i], tokens = page.column(line, "tokens")[i];
    const seconds = page.column(line, "seconds")?.[i];
    return `step ${whole.format(steps)} · ${short.format(tokens)} tokens${seconds === undefined ? "" : ` · ${duration(seconds)}`}`;
  }
}

new Page(JSON.parse(document.getElementById("data").textContent));
document.documentElement.dataset.ready = Math.round(performance.now());
