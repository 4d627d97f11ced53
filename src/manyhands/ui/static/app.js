"use strict";
// Text enters the page as text alone: `h` makes elements, and nothing parses HTML. The server has replaced what reorders.

function h(tag, props, ...kids) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width") element.style.width = value;
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...kids.flat(Infinity).filter(kid => kid !== null && kid !== undefined && kid !== false));
  return element;
}
const known = value => value !== null && value !== undefined;
const plain = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const whole = value => (known(value) ? plain.format(value) : "–");
const fixed = (value, digits = 4) => (known(value) ? value.toFixed(digits) : "–");
const short = value => !known(value) ? "–" : value && Math.abs(value) < 1e-3 ? value.toExponential(1).replace(".0", "")
  : Math.abs(value) >= 1000 ? whole(value) : String(+value.toPrecision(4));
const gib = value => (known(value) ? `${(value / 2 ** 30).toFixed(value < 10 * 2 ** 30 ? 2 : 1)} GiB` : "–");
const percent = value => (known(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : "–");
function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 100) return `${seconds < 10 ? +seconds.toPrecision(2) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 48 * 3600 ? `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min` : `${Math.round(seconds / 86400)} days`;
}
const ago = time => (time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "–");
const address = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try { response = await fetch(path, options); } catch { return { error: "The server of the page does not answer: start `manyhands ui` again." }; }
  return response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
}

// Charts.

const charts = new Set();
class Chart {
  // `format` writes a value; `axis` names x.
  constructor(title, { height = 190, format = short } = {}) {
    Object.assign(this, { title, height, format, data: null, plot: null, series: [] });
    this.values = h("span", { class: "values" });
    this.holder = h("div", { role: "img", "aria-label": title });
    this.element = h("section", { class: "card chart" }, h("h2", {}, title, this.values), this.holder);
    this.observer = new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.holder.clientWidth, height: this.height }));
    this.observer.observe(this.holder);
    charts.add(this);
  }
  // `lines`: [{label, color, x, y, low, high, dots, dash}]
  show(axis, lines) {
    lines = lines.filter(line => line.y.some(known));
    const series = [{}], bands = [], tables = [], style = getComputedStyle(document.documentElement);
    for (const line of lines) {
      const stroke = style.getPropertyValue(`--${line.color}`).trim(), table = [line.x];
      if (line.low && line.x.length >= 600) {
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}2e` });
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
        table.push(line.high, line.low);
      }
      const few = line.x.length < 2;
      const noisy = line.smooth && line.y.length >= 100;
      series.push({ label: line.label, line, stroke: noisy ? `${stroke}59` : stroke, width: noisy ? 1 : 2, dash: line.dash || (line.dots ? [5, 4] : undefined),
        points: { show: Boolean(line.dots) || few, size: 7, fill: stroke } });
      table.push(line.y);
      if (noisy) { series.push({ stroke, width: 2, points: { show: false } }); table.push(smooth(line.y)); }
      tables.push(table);
    }
    this.data = tables.length ? uPlot.join(tables) : null;
    const shape = JSON.stringify([axis, series.map(one => [one.label, one.stroke, one.points])]);
    if (this.plot && (shape !== this.shape || !this.data)) { this.plot.destroy(); this.plot = null; }
    Object.assign(this, { shape, series, axis });
    if (this.data && !this.plot) this.draw(bands, style);
    else if (this.data) { this.plot.setData(this.data); }
    if (!this.data) this.holder.replaceChildren(h("p", { class: "sub" }, "No values yet."));
    this.tell(null);
    this.holder.setAttribute("aria-label", `${this.title} by ${axis}: ${this.values.textContent || "no values yet"}`);
  }
  draw(bands, style) {
    const dim = style.getPropertyValue("--dim").trim(), grid = { stroke: style.getPropertyValue("--grid").trim(), width: 1 };
    const font = "12px system-ui, sans-serif", x = this.axis === "time" ? duration : value => value >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : whole(value);
    const axes = [x, short].map(format => ({ stroke: dim, grid, ticks: grid, font, size: format === x ? 30 : 62,
      values: (_, splits) => splits.map(split => format === x && this.axis !== "time" && split % 1 ? "" : format(split)) }));
    axes[1].space = 36;
    this.holder.replaceChildren();
    this.plot = new uPlot({ width: this.holder.clientWidth || 300, height: this.height, series: this.series, bands, axes, legend: { show: false },
      scales: { x: { time: false } }, cursor: { sync: { key: "x" }, drag: { x: true, y: false }, y: false, points: { size: 8 } },
      hooks: { setCursor: [plot => this.tell(plot.cursor.idx)] } }, this.data, this.holder);
  }
  tell(index) {
    const shown = this.series.map((one, number) => ({ one, values: this.data && this.data[number] })).filter(({ one }) => one.label);
    this.values.replaceChildren(...shown.map(({ one, values }) => {
      let place = known(index) ? index : values.length - 1;
      while (place >= 0 && !known(values[place])) place -= 1;
      return h("span", { class: "key" }, h("i", { class: one.line.color }), `${one.label} ${this.format(values[place])}`);
    }));
    if (known(index) && this.data) this.values.append(`${this.axis} ${this.axis === "time" ? duration(this.data[0][index]) : whole(this.data[0][index])}`);
  }
  close() { this.observer.disconnect(); if (this.plot) this.plot.destroy(); charts.delete(this); }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts) chart.shape = ""; if (view.refresh) view.refresh(); });
function smooth(values) { // the mean of neighbors, a fiftieth of all
  const reach = Math.max(1, Math.round(values.length / 100)), sums = [0], counts = [0];
  for (const value of values) { sums.push(sums.at(-1) + (value || 0)); counts.push(counts.at(-1) + known(value)); }
  return values.map((_, place) => {
    const first = Math.max(0, place - reach), end = Math.min(values.length, place + reach + 1);
    return counts[end] > counts[first] ? (sums[end] - sums[first]) / (counts[end] - counts[first]) : null;
  });
}
const line = (series, key, label, color) => ({ smooth: key !== "learning_rate", label, color, x: series.x, y: series[key].mean, low: series[key].low, high: series[key].high });

// Parts that views share.

const state = run => h("span", { class: `state ${run.state}` }, h("i", { "aria-hidden": "true" }), run.state);
function progress(run) {
  const share = run.num_steps ? Math.min(1, (run.step || 0) / run.num_steps) : 0;
  return h("span", { class: `bar ${run.state}`, role: "img", "aria-label": `${percent(share)} of the steps` }, h("span", { width: `${100 * share}%` }));
}
const steps = run => (known(run.step) ? whole(run.step) : "0") + (run.num_steps ? ` / ${whole(run.num_steps)}` : "");
function silence(run) { // seconds without a row, where they are too many
  const quiet = run.row_time ? Date.now() / 1000 - run.row_time : 0;
  return run.state === "running" && quiet > Math.max(10, 3 * (run.seconds || 0)) ? quiet : null;
}
const empty = (text, command) => h("div", { class: "card empty" }, h("p", {}, text), command && h("p", {}, h("code", {}, command)));
const message = (text, bad) => h("p", { class: `notice ${bad ? "bad" : ""}`, role: bad ? "alert" : "status" }, text);

// Views: each has an element, `update(changed names)` and perhaps `close` and `refresh`.

const chosen = new Set();
function runsView() {
  const rows = new Map(), body = h("tbody"), count = h("span", { class: "sub" });
  const filter = h("input", { type: "search", placeholder: "Filter by name, model, state", "aria-label": "Filter runs", oninput: () => update() });
  const compare = h("button", { type: "button", onclick: () => { location.hash = address("compare", ...chosen); } }, "Compare");
  const titles = [["", "wide"], ["Run"], ["State"], ["Progress"], ["Best held-out", "right"], ["Loss", "right"], ["Model and method", "wide"], ["Changed", "right wide"]];
  const table = h("div", { class: "card table" }, h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, titles.map(([title, kind]) => title ? h("th", { scope: "col", class: kind }, title) : h("td", { class: kind })))), body));
  const nothing = h("div");
  const element = h("div", { class: "view" }, h("div", { class: "head" }, h("h1", {}, "Runs"), count, h("div", { class: "row" }, filter, compare)), table, nothing);

  function makeRow(name) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${name}`, checked: chosen.has(name),
      onchange: () => { box.checked ? chosen.add(name) : chosen.delete(name); update(); } });
    const cells = ["", "progress", "right label", "right label", "wide", "right wide dim"].map(kind => h("td", { class: kind }));
    cells[2].dataset.label = "Best held-out"; cells[3].dataset.label = "Loss";
    const row = h("tr", {}, h("td", {}, box), h("th", { scope: "row" }, h("a", { href: address("run", name) }, name)), cells);
    return { row, cells, box };
  }
  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = [...runs.values()].filter(run => words.every(word => `${run.name} ${run.model} ${run.method} ${run.state}`.toLowerCase().includes(word)));
    shown.sort((a, b) => (b.state === "running") - (a.state === "running") || b.changed - a.changed || (a.name < b.name ? -1 : 1));
    const elements = shown.map(run => {
      if (!rows.has(run.name)) rows.set(run.name, makeRow(run.name));
      const { row, cells, drawn } = rows.get(run.name), quiet = silence(run), minute = Math.floor(Date.now() / 60000);
      const mark = JSON.stringify([run, minute, quiet && Math.floor(quiet)]);
      if (mark !== drawn) {
        rows.get(run.name).drawn = mark;
        const filled = [[state(run), quiet && h("div", { class: "sub" }, `no row for ${duration(quiet)}`)], [progress(run), h("span", { class: "sub num" }, steps(run))],
          [fixed(run.best)], [fixed(run.loss)], [run.model || "–", h("div", { class: "sub" }, [run.method, run.task, known(run.learning_rate) && `lr ${short(run.learning_rate)}`].filter(Boolean).join(" · "))], [ago(run.changed)]];
        cells.forEach((cell, number) => cell.replaceChildren(...filled[number].filter(Boolean)));
      }
      return row;
    });
    if (elements.length !== body.children.length || elements.some((row, number) => body.children[number] !== row)) {
      const focused = document.activeElement;
      body.replaceChildren(...elements);
      if (focused && body.contains(focused)) focused.focus();
    }
    for (const name of chosen) if (!runs.has(name)) chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    filter.hidden = runs.size < 8;
    table.hidden = !shown.length;
    const running = shown.filter(run => run.state === "running").length;
    count.textContent = `${whole(shown.length)} shown${running ? `, ${running} running` : ""}`;
    count.hidden = !runs.size;
    nothing.replaceChildren(shown.length || !connected ? "" : runs.size ? empty("No run matches the filter.") : empty("There is no run in this folder yet. Start one:", "manyhands train --model OWNER/NAME --data rows.jsonl"));
  }
  return { title: "Runs", element, update, tick: update };
}

function runView(name) {
  const loss = new Chart("Loss", { height: 320, format: value => fixed(value, 3) });
  const small = [["grad_norm", "Gradient norm", "c3"], ["tokens_per_s", "Tokens/s", "c4"], ["learning_rate", "Learning rate", "c5"]].map(([key, title, color]) => ({ key, color, title, chart: new Chart(title) }));
  const top = h("div"), tiles = h("dl", { class: "tiles" }), low = h("div", { class: "two" }), notices = h("div"), more = h("div", { class: "view" });
  const element = h("div", { class: "view" }, top, notices, tiles, loss.element, h("div", { class: "charts" }, small.map(one => one.chart.element)), low, more);
  let found = null, timer = null, asked = 0, closed = false, logs = "", kept = "";

  async function refresh() {
    clearTimeout(timer); timer = null; asked = Date.now();
    const answer = await ask(`/api/runs/${encodeURIComponent(name)}`);
    if (closed) return;
    if (answer.error) { notices.replaceChildren(message(answer.error, true)); return; }
    found = answer;
    draw();
    if (found.share_read < 1) later(700);
  }
  function later(wait) { if (!timer && !closed) timer = setTimeout(refresh, Math.max(0, wait - (Date.now() - asked))); }
  function head() {
    const run = runs.get(name) || found.run, quiet = silence(run);
    const where = run.num_ranks ? `${run.num_ranks} ${run.device === "cpu" ? "CPU process" + (run.num_ranks > 1 ? "es" : "") : "GPU" + (run.num_ranks > 1 ? "s" : "")}${run.strategy ? `, ${run.strategy}` : ""}` : "";
    top.replaceChildren(h("div", { class: "head" }, h("h1", {}, name), state(run), actions(run)),
      h("p", { class: "sub" }, [run.model, run.method, run.task, where, run.batch && `${whole(run.batch)} samples a step`].filter(Boolean).join(" · ")),
      h("p", { class: "sub num" }, progress(run), `step ${steps(run)}`));
    notices.replaceChildren(...[
      quiet && message(`No row for ${duration(quiet)}${run.seconds ? `; a step took ${duration(run.seconds)}` : ""}. ${stuck(found.ranks)}`),
      run.reason && run.state !== "finished" && message(`${run.state}: ${run.reason}`, run.state !== "interrupted"),
      found.share_read < 1 && message(`A sample of the rows is shown; ${percent(found.share_read)} read.`)].filter(Boolean));
    const evaluated = found.evaluations.filter(row => known(row.loss)), left = run.state === "running" && run.num_steps && run.seconds ? (run.num_steps - (run.step || 0)) * run.seconds : null;
    const peak = Math.max(0, ...found.ranks.map(rank => rank.peak || 0)), shareOfPlan = run.planned_tokens_per_s && run.tokens_per_s ? run.tokens_per_s / run.planned_tokens_per_s : null;
    tiles.replaceChildren(...[
      ["Training loss", fixed(run.loss), `step ${whole(run.step)}`],
      ["Best held-out loss", fixed(run.best), known(run.best_step) ? `at step ${whole(run.best_step)} of ${evaluated.length} evaluation${evaluated.length === 1 ? "" : "s"}` : "no evaluation yet"],
      ["Tokens/s", whole(run.tokens_per_s), known(shareOfPlan) ? `${percent(shareOfPlan)} of the plan` : "the plan has no figure for this device"],
      ["Peak memory", gib(peak || null), run.planned_bytes ? `planned ${gib(run.planned_bytes)} of ${gib(run.limit_bytes)}` : ""],
      ["Waiting for data", percent(found.wait_share), "of the newest step"],
      left === null ? ["Changed", ago(run.changed), ""] : ["Time left", duration(left), "of training, by the newest step"],
    ].map(([label, value, sub]) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value, h("span", { class: "sub" }, sub)))));
  }
  function draw() {
    const series = found.charts, run = found.run;
    head();
    loss.show("step", [line(series, "loss", "training", "c0"), { label: "held out", color: "c1", x: series.held_out.x, y: series.held_out.loss, dots: true }]);
    for (const { key, title, color, chart } of small) {
      const lines = [line(series, key, "", color)];
      lines[0].label = key === "tokens_per_s" ? "measured" : title.toLowerCase();
      if (key === "tokens_per_s" && run.planned_tokens_per_s && series.x.length) lines.push({ label: "planned", color: "c7", x: series.x, y: series.x.map(() => run.planned_tokens_per_s), dash: [4, 4] });
      chart.show("step", lines);
    }
    const mark = JSON.stringify([found.messages, found.output, found.ranks, found.samples.length, found.hang]);
    if (mark === logs) return;
    logs = mark;
    low.replaceChildren(ranksCard(found.ranks, run), samplesCard(found.samples));
    low.classList.toggle("two", low.children.length > 1);
    const settings = Object.entries(found.settings).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length));
    const open = new Set([...more.querySelectorAll("details[open]")].map(one => one.id));
    const fold = (id, title, ...content) => h("details", { class: "card", id, open: open.has(id) }, h("summary", {}, title), content);
    const log = lines => h("pre", { tabindex: "0", "aria-label": "Log" }, lines.join("\n"));
    const parts = [h("section", { class: "card" }, h("h2", {}, "Last messages"), found.messages.length ? log(found.messages) : h("p", { class: "sub" }, "None yet.")),
      found.hang && fold("hang", "What all ranks did when progress stopped", log([found.hang])),
      found.output.length ? fold("output", "Output of rank 0", log(found.output)) : "",
      fold("settings", `Settings (${settings.length})`, h("dl", { class: "settings" }, settings.map(([key, value]) => h("div", {}, h("dt", { class: "dim" }, key), h("dd", {}, Array.isArray(value) ? value.join(", ") : String(value)))))),
      h("p", { class: "sub" }, `Folder: ${found.folder}`)];
    more.replaceChildren(...parts.filter(Boolean));
    for (const one of more.querySelectorAll("pre")) one.scrollTop = one.scrollHeight;
  }
  refresh();
  return { title: name, element, refresh, update: changed => changed.has(name) && later(1000), tick: () => found && head(),
    close: () => { closed = true; clearTimeout(timer); loss.close(); for (const one of small) one.chart.close(); } };
}
function actions() { return h("div", { class: "actions" }); }
function stuck(ranks) {
  const at = ranks.filter(rank => rank.at);
  return at.length ? `Ranks are at: ${at.slice(0, 8).map(rank => `${rank.rank}: ${rank.at}`).join("; ")}.` : "";
}
function ranksCard(ranks, run) {
  const unit = run.device === "cpu" ? "Process" : "GPU", longest = Math.max(run.planned_bytes || 0, run.limit_bytes || 0, ...ranks.map(rank => rank.peak || 0)) || 1;
  const inside = run.planned_bytes && run.planned_bytes - (run.outside_bytes || 0);
  const rows = ranks.map(rank => h("tr", {}, h("th", { scope: "row", class: "num" }, `${rank.rank}`),
    h("td", {}, h("span", { class: "bar", role: "img", "aria-label": `${gib(rank.peak)} of planned ${gib(inside)}` }, h("span", { width: `${100 * (rank.peak || 0) / longest}%` }), inside ? h("span", { class: "planned", width: `${100 * inside / longest}%` }) : null)),
    h("td", { class: "right" }, gib(rank.peak)), h("td", { class: "right" }, percent(rank.utilization)), h("td", { class: "right" }, known(rank.seconds) ? `${rank.seconds.toFixed(2)} s` : "–"), h("td", { class: "sub" }, rank.is_gone ? "ended" : rank.at)));
  return h("section", { class: "card" }, h("h2", {}, `Each ${unit}`), ranks.length
    ? [h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, [unit, "Peak memory", "", "Busy", "Step", ranks.some(rank => rank.at) && "At"].map((title, number) => title ? h("th", { scope: "col", class: number > 1 && number < 5 ? "right" : "" }, title) : h("td")))), h("tbody", {}, rows))),
      h("p", { class: "sub" }, inside ? `The mark is what the plan expects in tensors: ${gib(inside)}; the bar ends at the limit of ${gib(longest)}.` : "")] : h("p", { class: "sub" }, "Nothing measured yet."));
}
function samplesCard(samples) {
  const title = h("h2", {}, "Answers during training");
  if (!samples.length) return h("section", { class: "card" }, title, h("p", { class: "sub" }, "None: the key evaluate.prompts asks for them."));
  const times = [...new Set(samples.map(sample => sample.step))], first = times[0], last = times[times.length - 1];
  const of = (step, prompt) => samples.find(sample => sample.step === step && sample.prompt === prompt);
  return h("section", { class: "card" }, title, samples.filter(sample => sample.step === last).slice(0, 6).map(sample => {
    const before = first !== last && of(first, sample.prompt);
    return [h("p", { class: "sub" }, "Prompt"), h("div", { class: "answer" }, sample.prompt), before && [h("p", { class: "sub" }, `At step ${whole(first)}`), h("div", { class: "answer" }, before.answer)],
      h("p", { class: "sub" }, `At step ${whole(last)}`), h("div", { class: "answer new" }, sample.answer)];
  }));
}

// The page: which view, and what the server reports.

const runs = new Map(), nav = document.getElementById("nav"), main = document.getElementById("main"), connection = document.getElementById("connection");
let view = {}, source = null, connected = false;
const VIEWS = { "": ["Runs", runsView], run: [null, runView] };

function show() {
  const [kind, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  if (view.close) view.close();
  view = (VIEWS[kind] || VIEWS[""])[1](...rest);
  document.title = `${view.title} · manyhands`;
  nav.replaceChildren(...Object.entries(VIEWS).filter(([, [title]]) => title).map(([name, [title]]) => h("a", { href: `#/${name}`, "aria-current": (name === kind || (name === "" && kind === "run")) && "page" }, title)));
  main.replaceChildren(view.element);
  view.element.classList.add("view");
  if (view.update) view.update(new Set(runs.keys()));
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
}
function connect() {
  source = new EventSource("/api/events");
  source.addEventListener("runs", event => {
    const data = JSON.parse(event.data), names = new Set(data.names);
    for (const run of data.runs) runs.set(run.name, run);
    for (const name of [...runs.keys()]) if (!names.has(name)) runs.delete(name);
    connected = true; connection.textContent = "";
    if (view.update) view.update(new Set(data.runs.map(run => run.name)));
  });
  source.onopen = () => { connection.textContent = ""; };
  source.onerror = () => { connection.textContent = "The server does not answer; runs go on without it."; if (source.readyState === 2) setTimeout(connect, 3000); };
}
document.addEventListener("visibilitychange", () => { // a page that nobody sees asks nothing
  if (document.hidden) { if (source) source.close(); } else { connect(); if (view.refresh) view.refresh(); }
});
addEventListener("hashchange", show);
setInterval(() => { if (!document.hidden && view.tick) view.tick(); }, 1000);
show();
connect();
