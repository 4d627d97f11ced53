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
    const near = Math.min(reach, place, values.length - 1 - place), first = place - near, end = place + near + 1;
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
const scroller = (label, ...kids) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, kids);
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
  const told = h("div"), tell = (text, bad) => told.replaceChildren(h("div", { class: `notice ${bad ? "bad" : "good"}`, role: "status" }, h("pre", {}, text)));
  const top = h("div"), tiles = h("dl", { class: "tiles" }), low = h("div", { class: "two" }), notices = h("div"), more = h("div", { class: "view" });
  const element = h("div", { class: "view" }, top, told, notices, tiles, loss.element, h("div", { class: "charts" }, small.map(one => one.chart.element)), low, more);
  let found = null, timer = null, asked = 0, closed = false, logs = "", drawn = "";

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
    const mark = JSON.stringify([run, found.ranks, quiet && Math.floor(quiet), Math.floor(Date.now() / 10000)]);
    if (mark === drawn) return;
    drawn = mark;
    if (!top.firstChild || top.dataset.state !== run.state) { top.dataset.state = run.state; top.replaceChildren(h("div", { class: "head" }, h("h1", {}, name), state(run), actions(run, tell)), h("div")); }
    top.lastChild.replaceChildren(h("p", { class: "sub" }, [run.model, run.method, run.task, where, run.batch && `${whole(run.batch)} samples a step`].filter(Boolean).join(" · ")),
      h("p", { class: "sub num" }, progress(run), `step ${steps(run)}`));
    notices.replaceChildren(...[
      quiet && message(`No row for ${duration(quiet)}${run.seconds ? `; a step took ${duration(run.seconds)}` : ""}. ${stuck(found.ranks)}`),
      run.reason && run.state !== "finished" && message(`${run.state}: ${run.reason}`, run.state !== "interrupted"),
      found.share_read < 1 && message(`A sample of the rows is shown; ${percent(found.share_read)} read.`)].filter(Boolean));
    const evaluated = found.evaluations.filter(row => known(row.loss)), left = run.state === "running" && run.num_steps && run.seconds ? (run.num_steps - (run.step || 0)) * run.seconds : null;
    const peak = Math.max(0, ...found.ranks.map(rank => rank.peak || 0)), shareOfPlan = run.planned_tokens_per_s && run.tokens_per_s ? run.tokens_per_s / run.planned_tokens_per_s : null;
    tiles.replaceChildren(...[
      ["Training loss", fixed(run.loss), `step ${whole(run.step)}`],
      ["Best held-out loss", fixed(run.best), known(run.best_step) ? `at step ${whole(run.best_step)}; ${evaluated.length} evaluation${evaluated.length === 1 ? "" : "s"}` : "no evaluation yet"],
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
    const [newest, other] = found.launcher_is_newer ? [found.messages, found.output] : [found.output, found.messages];
    const parts = [h("section", { class: "card" }, h("h2", {}, "Last messages"), newest.length ? log(newest.slice(-15)) : h("p", { class: "sub" }, "None yet.")),
      found.hang && fold("hang", "What all ranks did when progress stopped", log([found.hang])),
      other.length ? fold("other", found.launcher_is_newer ? "Output of rank 0" : "The launcher's plan and messages", log(other)) : "",
      fold("settings", `Settings (${settings.length})`, h("dl", { class: "settings" }, settings.map(([key, value]) => h("div", {}, h("dt", { class: "dim" }, key), h("dd", {}, Array.isArray(value) ? value.join(", ") : String(value)))))),
      h("p", { class: "sub" }, `Folder: ${found.folder}`)];
    more.replaceChildren(...parts.filter(Boolean));
    for (const one of more.querySelectorAll("pre")) one.scrollTop = one.scrollHeight;
  }
  refresh();
  return { title: name, element, refresh, update: changed => changed.has(name) && later(1000), tick: () => found && head(),
    close: () => { closed = true; clearTimeout(timer); loss.close(); for (const one of small) one.chart.close(); } };
}
function actions(run, tell) {
  const act = async (action, done) => { const answer = await ask(`/api/runs/${encodeURIComponent(run.name)}/${action}`, {}); tell(answer.error || done(answer), Boolean(answer.error)); };
  const button = (label, action, done, kind) => h("button", { type: "button", class: kind, onclick: () => act(action, done) }, label);
  return h("div", { class: "actions" }, run.state === "running"
    ? [button("What does it wait for?", "examine", answer => answer.done.join("\n")), button("Stop", "stop", () => "The run saves its state and ends. Resume continues it.", "danger")]
    : run.state !== "finished" && button("Resume", "resume", () => "In the queue: it starts when the machine is free.", "primary"),
  h("a", { class: "button", href: address("data", run.name) }, "Data"), h("a", { class: "button", href: address("compare", run.name) }, "Compare"));
}
function stuck(ranks) {
  const at = ranks.filter(rank => rank.at);
  return at.length ? `Ranks are at: ${at.slice(0, 8).map(rank => `${rank.rank}: ${rank.at}`).join("; ")}.` : "";
}
function ranksCard(ranks, run) {
  const unit = run.device === "cpu" ? "Process" : "GPU", longest = Math.max(run.planned_bytes || 0, run.limit_bytes || 0, ...ranks.map(rank => rank.peak || 0)) || 1;
  const inside = run.tensor_bytes;
  const rows = ranks.map(rank => h("tr", {}, h("th", { scope: "row", class: "num" }, `${rank.rank}`),
    h("td", {}, h("span", { class: "bar", role: "img", "aria-label": `${gib(rank.peak)} of planned ${gib(inside)}` }, h("span", { width: `${100 * (rank.peak || 0) / longest}%` }), inside ? h("span", { class: "planned", width: `${100 * inside / longest}%` }) : null)),
    h("td", { class: "right" }, gib(rank.peak)), h("td", { class: "right" }, percent(rank.utilization)), h("td", { class: "right" }, known(rank.seconds) ? `${rank.seconds.toFixed(2)} s` : "–"), h("td", { class: "sub" }, rank.is_gone ? "ended" : rank.at)));
  return h("section", { class: "card" }, h("h2", {}, `Memory and speed by ${unit === "GPU" ? unit : "process"}`), ranks.length
    ? [scroller("Ranks", h("table", {}, h("thead", {}, h("tr", {}, [unit, "Peak memory", "", "Busy", "Step", ranks.some(rank => rank.at) && "At"].map((title, number) => title ? h("th", { scope: "col", class: number > 1 && number < 5 ? "right" : "" }, title) : h("td")))), h("tbody", {}, rows))),
      h("p", { class: "sub" }, inside ? `The mark is what the plan expects${run.device === "cuda" ? " of tensors" : ""}: ${gib(inside)}; the bar ends at ${gib(longest)}, the limit.` : "")] : h("p", { class: "sub" }, "Nothing measured yet."));
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

function compareView(...names) {
  const loss = new Chart("Training loss", { height: 320, format: value => fixed(value, 3) }), held = new Chart("Held-out loss", { height: 240, format: value => fixed(value, 3) });
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: refresh }, [["step", "by steps"], ["tokens", "by tokens"], ["time", "by training time"]].map(([value, label]) => h("option", { value }, label)));
  const add = h("select", { "aria-label": "Add a run", onchange: () => { if (add.value) location.hash = address("compare", ...names, add.value); } });
  const table = h("div", { class: "card table" }), notices = h("div");
  const element = h("div", {}, h("div", { class: "head" }, h("h1", {}, "Compare"), h("div", { class: "row" }, add, axis)), notices, loss.element, held.element, table);
  let closed = false, timer = null, others = "";
  const color = number => `c${number % 8}`;

  async function refresh() {
    clearTimeout(timer); timer = null;
    for (const one of [loss.element, held.element, table]) one.hidden = !names.length;
    if (!names.length) { notices.replaceChildren(empty("Choose runs to compare: above, or by their boxes in the list of runs.")); return; }
    const found = await ask(`/api/compare?axis=${axis.value}&${names.map(name => `run=${encodeURIComponent(name)}`).join("&")}`);
    if (closed) return;
    notices.replaceChildren(found.error ? message(found.error, true) : "");
    if (found.error) return;
    const by = { step: "step", tokens: "tokens", time: "time" }[axis.value];
    loss.show(by, found.runs.map(({ run, charts: series }, number) => ({ ...line(series, "loss", run.name, color(number)), low: null })));
    held.show(by, found.runs.map(({ run, charts: series }, number) => ({ label: run.name, color: color(number), x: series.held_out.x, y: series.held_out.loss, dots: true })));
    held.element.hidden = !held.data;
    const best = Math.min(...found.runs.map(({ run }) => run.best ?? Infinity));
    const rows = [["State", run => state(run)], ["Step", run => steps(run)], ["Best held-out loss", run => known(run.best) ? [fixed(run.best), run.best === best && found.runs.length > 1 ? h("span", { class: "sub" }, " lowest") : ""] : "–"],
      ["Training loss, newest", run => fixed(run.loss)], ["Tokens/s, newest", run => whole(run.tokens_per_s)]];
    table.replaceChildren(scroller("Runs and keys", h("table", {}, h("thead", {}, h("tr", {}, h("td"), found.runs.map(({ run }, number) => h("th", { scope: "col" }, h("span", { class: `key ${color(number)}` }, h("i"), h("a", { href: address("run", run.name) }, run.name)),
      h("button", { type: "button", class: "small", "aria-label": `Remove ${run.name}`, onclick: () => { location.hash = address("compare", ...names.filter(name => name !== run.name)); } }, "×"))))),
    h("tbody", {}, rows.map(([label, value]) => h("tr", {}, h("th", { scope: "row", class: "label" }, label), found.runs.map(({ run }) => h("td", { class: "num" }, value(run))))),
      found.differences.map(({ key, values }) => h("tr", {}, h("th", { scope: "row", class: "label" }, h("code", {}, key)), values.map(value => h("td", { class: "num" }, value))))))),
    found.runs.length > 1 && !found.differences.length ? h("p", { class: "sub" }, "All keys of these runs are the same.") : "");
  }
  function update(changed) {
    const rest = [...runs.keys()].filter(name => !names.includes(name)).sort(), mark = rest.join("/");
    if (mark !== others) { others = mark; add.replaceChildren(h("option", { value: "" }, "Add a run"), ...rest.map(name => h("option", { value: name }, name))); }
    if (!timer && names.some(name => changed.has(name))) timer = setTimeout(refresh, 2000);
  }
  refresh();
  return { title: "Compare", element, refresh, update, close: () => { closed = true; clearTimeout(timer); loss.close(); held.close(); } };
}

// Forms: what `manyhands train`, `plan` and `data` take.

const FIELDS = [["model", "Model", "Qwen/Qwen3-0.6B or a folder"], ["data", "Training data", "rows.jsonl or hub:OWNER/NAME"], ["method", "Method", ["", "lora", "qlora", "full"]], ["epochs", "Epochs", ""], ["learning_rate", "Learning rate", ""],
  ["batch_size", "Samples a step", ""], ["max_length", "Longest sample, tokens", ""], ["run", "or a run file", "run.yaml"]];
function fields(more = []) {
  return h("div", { class: "fields" }, [...FIELDS, ...more].map(([name, label, hint]) => h("label", {}, label, Array.isArray(hint)
    ? h("select", { name }, hint.map(value => h("option", { value }, value || "as the defaults")))
    : h("input", { name, placeholder: hint, autocomplete: "off", spellcheck: "false" }))), h("label", { class: "keys" }, "Further keys, one a line", h("textarea", { name: "keys", rows: "2", placeholder: "optimizer.name=muon", spellcheck: "false" })));
}
const remembered = {};
function remember(form) {
  for (const element of form.elements) if (element.name) { if (remembered[element.name]) element.value = remembered[element.name]; element.addEventListener("input", () => { remembered[element.name] = element.value; }); }
  return form;
}
const filled = form => Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim()));

function planView() {
  const result = h("div", { class: "view" }), busy = h("span", { class: "sub", role: "status" });
  const form = remember(h("form", { class: "card", onsubmit: async event => {
    event.preventDefault();
    busy.textContent = "Planning: rows are tokenized the first time.";
    const asked = filled(form), price = Number(asked.price) || null;
    delete asked.name;
    const plan = await ask("/api/plan", { ...asked, price });
    busy.textContent = "";
    result.replaceChildren(...(plan.error ? [h("div", { class: "notice bad", role: "alert" }, h("pre", {}, plan.error))] : planResult(plan)));
  } }, fields([["gpus", "GPUs, here or not", "2, 8xH200, H100-4x"], ["price", "Price of a GPU-hour", ""], ["name", "Name of the run, to start it", ""]]),
  h("div", { class: "row" }, h("button", { class: "primary" }, "Plan"), h("button", { type: "button", onclick: start }, "Start"), busy)));
  async function start() {
    const asked = filled(form);
    delete asked.price;
    if (asked.gpus && !/^\d+$/.test(asked.gpus)) delete asked.gpus;
    busy.textContent = "Checking: rows are tokenized the first time.";
    const answer = await ask("/api/queue", { action: "add", ...asked });
    busy.textContent = "";
    if (answer.error) result.replaceChildren(h("div", { class: "notice bad", role: "alert" }, h("pre", {}, answer.error)));
    else location.hash = "#/queue";
  }
  return { title: "Plan", element: h("div", {}, h("h1", {}, "Plan a run"), form, result) };
}
function planResult(plan) {
  const tiles = [["A step", plan.seconds === null ? "–" : duration(plan.seconds), plan.seconds === null ? "rates of this device are not known" : `${whole(plan.tokens_per_s)} tokens/s`], ["Steps", whole(plan.num_steps), `${plan.num_ranks} ${plan.device === "cpu" ? "CPU processes" : "GPUs"}`],
    ["Whole run", duration(plan.total_s), known(plan.gpu_hours) ? `${plan.gpu_hours.toFixed(2)} GPU-hours` : ""], ["Memory of each", gib(Object.values(plan.memory).reduce((sum, size) => sum + size, 0)), `of ${gib(plan.limit)}`]];
  if (plan.cost) tiles.push(["Cost", plan.cost.replace(/^cost: /, "").split(" at ")[0], plan.cost.includes(" at ") ? `at ${plan.cost.split(" at ")[1]}` : ""]);
  const terms = Object.entries(plan.memory).sort((a, b) => b[1] - a[1]), scale = Math.max(plan.limit, terms.reduce((sum, [, size]) => sum + size, 0));
  const ordered = [...plan.candidates].sort((a, b) => b.chosen - a.chosen || b.fits - a.fits || (a.seconds ?? 0) - (b.seconds ?? 0));
  return [h("dl", { class: "tiles" }, tiles.map(([label, value, sub]) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value, h("span", { class: "sub" }, sub))))),
    h("section", { class: "card" }, h("h2", {}, "Memory by term"), h("div", { class: "stack", role: "img", "aria-label": terms.map(([name, size]) => `${name} ${gib(size)}`).join(", ") }, terms.map(([, size], number) => h("span", { class: `b${number % 8}`, width: `${100 * size / scale}%` }))),
      h("p", { class: "sub" }, terms.map(([name, size], number) => h("span", { class: "key" }, h("i", { class: `c${number % 8}` }), `${name} ${gib(size)}`)))),
    h("section", { class: "card" }, h("h2", {}, `Candidates (${ordered.length}): memory and seconds of a step`), scatter(plan), scroller("Candidates", h("table", { class: "candidates" }, h("thead", {}, h("tr", {}, ["Strategy", "Recomputed", plan.packing ? "Micro tokens" : "Micro samples", "Memory", "Step", "Why it lost"].map((title, number) => h("th", { scope: "col", class: number > 1 && number < 5 ? "right" : "" }, title)))),
      h("tbody", {}, ordered.map(one => h("tr", { class: one.chosen && "chosen" }, h("th", { scope: "row" }, one.name), h("td", {}, one.checkpointing), h("td", { class: "right" }, whole(one.micro)), h("td", { class: "right" }, gib(one.bytes)), h("td", { class: "right" }, known(one.seconds) ? `${one.seconds.toPrecision(3)} s` : "–"), h("td", {}, one.reason))))))),
    h("details", { class: "card" }, h("summary", {}, "Every decision, and why"), h("dl", { class: "decisions" }, plan.decisions.map(([topic, text]) => [h("dt", { class: "dim" }, topic), h("dd", {}, text)])))];
}
function round(low, high) { // some five round numbers from low to high
  const size = (high - low) / 4 || 1, ten = 10 ** Math.floor(Math.log10(size)), step = ten * [1, 2, 5, 10].find(one => one * ten >= size * 0.999);
  return Array.from({ length: Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1 }, (_, number) => +((Math.ceil(low / step - 1e-9) + number) * step).toPrecision(6));
}
function scatter(plan) { // each candidate a dot: memory to the right, seconds upwards
  const shown = plan.candidates.filter(one => known(one.seconds)), W = Math.min(900, Math.max(300, innerWidth - 70)), H = 260, L = 60, B = 36, GiB = 2 ** 30;
  if (shown.length < 2) return h("p", { class: "sub" }, "Seconds are not known on this device: the table has the memory.");
  const make = (tag, props, ...kids) => { const element = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [name, value] of Object.entries(props)) element.setAttribute(name, value); element.append(...kids); return element; };
  const largest = Math.max(...shown.map(one => one.bytes)), far = plan.limit > 3 * largest; // the limit would leave the dots no room
  const right = far ? 1.5 * largest : Math.min(1.05 * Math.max(largest, plan.limit), 2 * plan.limit), low = 0.9 * Math.min(...shown.map(one => one.seconds)), high = 1.05 * Math.max(...shown.map(one => one.seconds));
  const x = bytes => L + (W - L - 15) * Math.min(1, bytes / right), y = seconds => H - B - (H - B - 15) * (seconds - low) / (high - low);
  const text = (at, top, words, anchor = "middle") => make("text", { x: at, y: top, "text-anchor": anchor }, words);
  return [make("svg", { viewBox: `0 0 ${W} ${H}`, class: "scatter", role: "img", "aria-label": `${shown.length} candidates by memory and seconds of a step; the table below has all of them` },
    ...round(low, high).flatMap(seconds => [make("line", { class: "grid", x1: L, x2: W - 15, y1: y(seconds), y2: y(seconds) }), text(L - 8, y(seconds) + 4, `${seconds} s`, "end")]),
    ...round(0, right / GiB).map(size => text(x(size * GiB), H - 12, `${size} GiB`)),
    ...(far ? [] : [make("line", { class: "limit", x1: x(plan.limit), x2: x(plan.limit), y1: 8, y2: H - B })]), text(x(plan.limit) - 6, 20, `limit ${gib(plan.limit)}${far ? " →" : ""}`, "end"),
    ...shown.sort((a, b) => a.chosen - b.chosen).map(one => make("circle", { class: one.chosen ? "chosen" : one.fits ? "fits" : "beyond", cx: x(one.bytes), cy: y(one.seconds), r: one.chosen ? 8 : 4.5 }, make("title", {}, `${one.name}, ${one.checkpointing}, ${whole(one.micro)}: ${gib(one.bytes)}, ${one.seconds.toPrecision(3)} s. ${one.reason}`)))),
  h("p", { class: "sub" }, `Seconds upwards, memory to the right; the large dot is chosen${shown.some(one => !one.fits) ? ", an empty one does not fit" : ""}.`)];
}

function dataView(name) {
  const result = h("div", { class: "view" }), busy = h("span", { class: "sub", role: "status" });
  const step = h("input", { name: "step", type: "number", min: "1", value: "1", class: "number" });
  async function look(asked) {
    busy.textContent = "Reading: rows are tokenized the first time.";
    const found = await ask("/api/data", { ...asked, step: Number(step.value) || 1, rows: 8 });
    busy.textContent = "";
    result.replaceChildren(...(found.error ? [h("div", { class: "notice bad", role: "alert" }, h("pre", {}, found.error))] : dataResult(found)));
  }
  const button = h("button", { class: "primary" }, "Show"), last = h("div", { class: "row" }, h("label", { class: "inline" }, "Step", step), button, busy);
  const form = name ? h("form", { class: "card", onsubmit: event => { event.preventDefault(); look({ of: name }); } }, last)
    : remember(h("form", { class: "card", onsubmit: event => { event.preventDefault(); const { step: _, ...asked } = filled(form); look(asked); } }, fields(), last));
  if (name) look({ of: name });
  return { title: "Data", element: h("div", {}, h("h1", {}, name ? `Data of ${name}` : "Data"), form, result) };
}
function dataResult(found) {
  const most = Math.max(1, ...found.lengths.map(one => one.num_samples)), batch = found.batch;
  const parts = found.refused.map(one => h("div", { class: "notice bad" }, h("p", {}, `${one.source}: rows that a run refuses`), h("pre", {}, one.errors.join("\n\n"))));
  if (found.plan_error) parts.push(h("div", { class: "notice" }, h("pre", {}, found.plan_error)));
  if (batch) parts.push(h("section", { class: "card" }, h("h2", {}, batch.packed ? `First pack of step ${whole(batch.step)}` : `First micro-batch of step ${whole(batch.step)}`),
    h("div", { class: "stack", role: "img", "aria-label": `${batch.num_tokens} of ${batch.capacity} filled` }, found.samples.map((sample, number) => h("span", { class: `b${number % 8}`, width: `${100 * (batch.packed ? sample.num_tokens : 1) / batch.capacity}%` })), found.num_more_rows > 0 && batch.packed && h("span", { class: "b7", width: `${100 * (batch.num_tokens - found.samples.reduce((sum, one) => sum + one.num_tokens, 0)) / batch.capacity}%` })),
    h("p", { class: "sub" }, `${whole(batch.num_samples)} samples with ${whole(batch.num_tokens)} tokens${batch.packed ? ` of ${whole(batch.capacity)}` : ""}; the step has ${whole(batch.num_step_samples)} samples in ${batch.num_micro_batches} micro-batch${batch.num_micro_batches > 1 ? "es" : ""} on each of ${batch.num_ranks} rank${batch.num_ranks > 1 ? "s" : ""}.`)));
  parts.push(...found.samples.map((sample, number) => h("section", { class: "card" }, h("h2", {}, h("i", { class: `dot b${number % 8}`, "aria-hidden": "true" }), sample.place, h("span", { class: "sub" }, ` ${whole(sample.num_tokens)} tokens, ${whole(sample.num_loss_tokens)} of them trained`)),
    h("div", { class: "sample" }, sample.spans.map(([text, weight]) => weight ? h("mark", {}, text) : h("span", {}, text))), sample.images.map(image => image.thumbnail && h("img", { src: image.thumbnail, alt: `${image.width} × ${image.height}, ${image.num_tokens} tokens` })))));
  if (found.samples.length) parts.splice(parts.length - found.samples.length, 0, h("p", { class: "sub" }, h("mark", {}, "Colored text"), " is trained: its tokens have a loss. The rest is context."));
  parts.push(h("div", { class: "two" }, h("section", { class: "card" }, h("h2", {}, "Lengths in tokens"), found.lengths.map(one => h("div", { class: "length" }, h("span", { class: "dim num" }, one.first === one.last ? whole(one.first) : `${whole(one.first)}–${whole(one.last)}`), h("span", { class: "bar" }, h("span", { width: `${100 * one.num_samples / most}%` })), h("span", { class: "right" }, whole(one.num_samples)))), h("p", { class: "sub" }, found.length_words)),
    h("section", { class: "card" }, h("h2", {}, "Sources"), scroller("Sources", h("table", {}, h("thead", {}, h("tr", {}, ["Source", "Samples", "Tokens", "Trained"].map((title, number) => h("th", { scope: "col", class: number && "right" }, title)))), h("tbody", {}, found.sources.map(one => h("tr", {}, h("th", { scope: "row" }, one.name), [one.num_samples, one.num_tokens, one.num_loss_tokens].map(value => h("td", { class: "right" }, whole(value)))))))),
      h("dl", { class: "decisions" }, found.counts.map(([label, value]) => [h("dt", { class: "dim" }, label), h("dd", {}, value)])), found.notes.map(note => h("p", { class: "sub" }, note)))));
  return parts;
}

let queue = { paused: false, items: [] };
function queueView() {
  const list = h("div", { class: "view" }), told = h("div"), pause = h("button", { type: "button", onclick: () => change({ action: "pause", paused: !queue.paused }) });
  async function change(body) { const answer = await ask("/api/queue", body); told.replaceChildren(answer.error ? message(answer.error, true) : ""); }
  let drawn = "";
  function update() {
    const mark = JSON.stringify(queue);
    if (mark === drawn) return;
    drawn = mark;
    const order = { running: 0, waiting: 1 }, items = queue.items.filter(one => one.state in order).sort((a, b) => order[a.state] - order[b.state] || a.id - b.id), ended = queue.items.filter(one => !(one.state in order)).reverse();
    pause.textContent = queue.paused ? "Continue" : "Pause"; pause.hidden = !queue.paused && !items.length;
    const card = one => h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, one.title), state(one), h("span", { class: "sub" }, one.state === "waiting" ? `added ${ago(one.added)}` : one.ended ? `ended ${ago(one.ended)}` : `started ${ago(one.started)}`),
      one.state === "running" ? h("span") : h("button", { type: "button", class: "small", "aria-label": `Remove ${one.title}`, onclick: () => change({ action: "remove", id: one.id }) }, "Remove")), h("p", { class: "sub" }, h("code", {}, one.words)), one.log.length > 0 && one.state !== "finished" && h("pre", {}, one.log.join("\n")));
    list.replaceChildren(...(queue.paused ? [message("Paused: what runs goes on, and nothing further is started.")] : []), ...items.map(card), ...(ended.length ? [h("h2", {}, "Ended")] : []), ...ended.map(card),
      ...(queue.items.length ? [] : [empty("Nothing waits. What is started from the view Plan, or resumed, starts when the GPUs are free, one after the other.")]));
  }
  update();
  return { title: "Queue", update, element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Queue"), pause), told, list) };
}

// The page: which view, and what the server reports.

const runs = new Map(), nav = document.getElementById("nav"), main = document.getElementById("main"), connection = document.getElementById("connection");
let view = {}, source = null, connected = false;
const VIEWS = { "": ["Runs", runsView], run: [null, runView], compare: ["Compare", compareView], plan: ["Plan", planView], data: ["Data", dataView], queue: ["Queue", queueView] };

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
  source.addEventListener("queue", event => { queue = JSON.parse(event.data); if (view.title === "Queue") view.update(); });
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
