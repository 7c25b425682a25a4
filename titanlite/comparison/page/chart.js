"use strict";
// A chart of one metric, with a line per run. uPlot draws it once it is scrolled into view.

class Chart {
  constructor(metric, figure, page) {
    Object.assign(this, { metric, figure, page, plot: null, isStale: true, isSeen: false });
    this.box = figure.querySelector(".plot");
    this.remark = figure.querySelector(".remark");
    this.box.addEventListener("keydown", event => this.onKey(event));
    this.box.addEventListener("blur", () => page.tip.hide());
  }

  // The lines of all visible runs with values on the chosen axis, each with the arrays to draw.
  lines() {
    const { page } = this;
    return this.metric.lines.filter(line => !page.view.hidden.has(line.run) && page.column(line, page.view.axis)).map(line => {
      const values = page.values(line.mean), steps = page.column(line, "steps");
      const span = this.metric.isNoisy && values.length > 50 ? page.view.span : 0;
      return {
        line, values, steps, isSmoothed: span > 0, x: page.column(line, page.view.axis),
        main: smoothed(steps, values, span),
        low: line.low && page.values(line.low), high: line.high && page.values(line.high),
      };
    });
  }

  draw() {
    if (!this.isSeen) { this.isStale = true; return; }
    this.isStale = false;
    this.plot?.destroy();
    this.drawn = this.lines();
    const list = [], tables = [], bands = [];
    const series = (line, more) => ({ spanGaps: false, ...more, stroke: () => this.page.colour(line.run, more.faint) });
    const faint = most => Math.round(255 * Math.min(most, 1 / (1 + this.drawn.length))).toString(16).padStart(2, "0");
    let number = 1; // index of the next series; uPlot's series 0 is x
    for (const { line, x, main, values, isSmoothed, low, high } of this.drawn) {
      const table = [x];
      if (low) {
        bands.push({ series: [number + 1, number], fill: () => this.page.colour(line.run, faint(this.metric.bands ? 0.12 : 0.22)) });
        for (const edge of [low, high]) {
          table.push(edge);
          list.push(series(line, { faint: faint(0.3), width: 0.5, points: { show: false } }));
          number++;
        }
      } else if (isSmoothed) {
        table.push(values);
        list.push(series(line, { faint: faint(0.3), width: 1, points: { show: false } }));
        number++;
      }
      table.push(main);
      list.push(series(line, { isMain: true, width: this.page.width(line.run), dash: this.page.dash(line.run), points: { size: 5 } }));
      number++;
      tables.push(table);
    }
    const isAlike = tables.every(table => table[0] === tables[0][0]);
    const data = !tables.length ? [[]] : isAlike ? [tables[0][0], ...tables.flatMap(table => table.slice(1))] : uPlot.join(tables);
    this.plot = new uPlot(this.options(list, bands), data, this.box);
  }

  options(series, bands) {
    const { page } = this, axis = { font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      stroke: () => page.ink.text, grid: { stroke: () => page.ink.grid, width: 1 }, ticks: { stroke: () => page.ink.grid, width: 1, size: 4 } };
    return {
      width: this.box.clientWidth, height: this.box.clientHeight, bands,
      legend: { show: false },
      scales: { x: { time: false, range: () => page.range() }, y: { range: () => this.limits() } },
      axes: [
        { ...axis, size: 30, label: page.axisLabel(), labelSize: 18,
          incrs: () => page.tickSteps(), values: (_u, ticks, _axis, _space, step) => ticks.map(v => page.tick(v, step)) },
        { ...axis, values: (_u, ticks, _axis, _space, step) => ticks.map(v => tickText(v, step)), size: (u, texts) => 14 + 7 * Math.max(3, ...(texts ?? []).map(text => text.length)) },
      ],
      series: [{}, ...series],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        points: { show: (u, number) => u.series[number].isMain ? undefined : false, size: 7 },
        dataIdx: (u, number, at) => known(u.data[number], at),
        bind: { dblclick: () => () => { page.zoom(null); return null; } },
      },
      hooks: {
        drawAxes: [() => this.drawBands()],
        draw: [() => this.note()],
        setCursor: [u => this.onCursor(u)],
        setSelect: [u => this.onSelect(u)],
      },
    };
  }

  limits() {
    const [left, right] = this.page.range(), lines = this.drawn.map(({ x, main }) => [x, main]);
    const { bands } = this.metric, edges = this.bands().flatMap(([x, ...sides]) => sides.map(side => [x, side]));
    if (this.page.view.isFull) {
      const all = this.drawn.flatMap(({ x, values, low, high }) => low ? [[x, low], [x, high]] : [[x, values]]);
      return fullLimits([...lines, ...all, ...edges, ...(bands ? [[[left], [0]]] : [])], left, right);
    }
    let [low, high] = fittedLimits(lines, left, right, this.page.end());
    for (const [x, edge] of edges) { // fitted apart from the lines, whose many points would outweigh it
      if (!x.some((v, i) => v >= left && v <= right && edge[i] !== null)) continue;
      const [least, most] = fittedLimits([[x, edge]], left, right, this.page.end());
      [low, high] = [Math.min(low, least), Math.max(high, most)];
    }
    if (bands) [low, high] = [Math.min(low, -0.05 * (high - low)), Math.max(high, 0.05 * (high - low))];
    const lack = this.metric.leastShare * Math.abs(high) - (high - low);
    return lack > 0 ? [low - lack / 2, high + lack / 2] : [low, high];
  }

  // The bands in which differences are no more than noise, for all visible runs: [x, lower limits, upper limits].
  bands() {
    const { page } = this, { axis, hidden } = page.view;
    return (this.metric.bands ?? []).filter(band => !hidden.has(band.run) && page.column(band, axis))
      .map(band => [page.column(band, axis), page.values(band.low), page.values(band.high)]);
  }

  // Write below the chart how many values its axis leaves out; store its limits and runs in attributes of the figure.
  note() {
    const { plot, metric } = this, { x, y } = plot.scales;
    this.figure.dataset.x = `${x.min},${x.max}`;
    this.figure.dataset.y = `${y.min},${y.max}`;
    this.figure.dataset.lines = this.drawn.map(({ line }) => line.run).join();
    let all = 0, above = 0, below = 0;
    for (const { x: at, main } of this.drawn)
      main.forEach((v, i) => {
        if (v === null || at[i] < x.min || at[i] > x.max) return;
        all++;
        above += v > y.max;
        below += v < y.min;
      });
    const share = n => `${n / all < 0.01 ? "under 1" : Math.round(100 * n / all)} %`;
    const said = [];
    if (above) said.push(`${share(above)} of the values lie above the axis`);
    if (below) said.push(`${share(below)} below it`);
    for (const { line } of this.drawn)
      if (line.lost) said.push(`${this.page.data.runs[line.run].name}: ${line.lost} ${line.lost > 1 ? "values" : "value"} not finite`);
    if (!all) said.push(this.drawn.length ? "no value here" : metric.lines.some(({ run }) => !this.page.view.hidden.has(run)) ? "no such axis" : "all runs are switched off");
    this.remark.textContent = said.join("; ");
  }

  // In a chart of differences, draw the bands of noise and the line at zero.
  drawBands() {
    const { plot, page, metric } = this;
    if (!metric.bands) return;
    const { ctx, bbox } = plot, at = (v, scale) => plot.valToPos(v, scale, true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = page.ink.band;
    for (const [x, low, high] of this.bands()) {
      ctx.beginPath();
      x.forEach((v, i) => ctx.lineTo(at(v, "x"), at(high[i], "y")));
      for (let i = x.length - 1; i >= 0; i--) ctx.lineTo(at(x[i], "x"), at(low[i], "y"));
      ctx.fill();
    }
    ctx.strokeStyle = page.ink.text;
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(bbox.left, at(0, "y"));
    ctx.lineTo(bbox.left + bbox.width, at(0, "y"));
    ctx.stroke();
    ctx.restore();
  }

  onSelect(plot) {
    const { left, width } = plot.select;
    if (width > 3) this.page.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  onCursor(plot) {
    const { left } = plot.cursor;
    if (left === null || left === undefined || left < 0) { this.page.tip.hide(); return; }
    const at = plot.posToVal(left, "x"), around = plot.over.getBoundingClientRect();
    this.page.tip.show(this, at, around.left + left, around);
  }

  onKey(event) {
    const { plot, page } = this;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = plot.over.clientWidth, left = plot.cursor.left >= 0 ? plot.cursor.left : width / 2;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) {
      const to = left + move * width / (event.shiftKey ? 10 : 100);
      plot.setCursor({ left: Math.min(Math.max(to, 0), width), top: plot.over.clientHeight / 2 });
    } else if (factor) {
      const [from, to] = page.range(), at = plot.posToVal(left, "x");
      page.zoom([at - (at - from) * factor, at + (to - at) * factor]);
    } else if (event.key === "0" || event.key === "Escape") {
      page.zoom(null);
    } else return;
    event.preventDefault();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.box;
    if (this.plot && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  rezoom() {
    if (!this.plot || !this.isSeen) { this.isStale = true; return; }
    const [min, max] = this.page.range();
    this.plot.setScale("x", { min, max });
  }
}

// The index of the value nearest to `at`: in joined tables, values are undefined at x values of other lines.
function known(values, at) {
  if (!values || values[at] !== undefined) return at;
  for (let away = 1; away < values.length; away++)
    for (const number of [at - away, at + away])
      if (values[number] !== undefined) return number;
  return at;
}
