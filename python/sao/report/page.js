"use strict";
// What the page does. Everything from a run is a stranger's text: it becomes text nodes, never markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3572b0", "#d1495b", "#3a8f5c", "#a04bb0", "#c98a1b", "#1d9a9a", "#8a6d4f", "#5b5fc7"];
const CAUSES = { wait: "#aab", critic: "#d1495b", policy: "#3572b0", optimizer: "#c98a1b", publish: "#a04bb0", move: "#8a6d4f", plan: "#1d9a9a", advantages: "#3a8f5c", gap: "#5b5fc7", save: "#e07b39", computing: "#3a8f5c" };
const MANY = 20000; // characters of one given block that are shown at once
const ROWS = 200; // rows of the table that are added at once
const $ = (id) => document.getElementById(id);
const short = (x) => (x === null || x === undefined ? "–" : typeof x !== "number" ? String(x) : Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4))));

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(child))));
  return element;
}

// -- tabs and runs

const shown = DATA.runs.map(() => true);
const drawn = {};
function open(tab) {
  for (const button of document.querySelectorAll("[role=tab]")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === tab));
    $(button.dataset.tab).hidden = button.dataset.tab !== tab;
  }
  if (!drawn[tab]) {
    drawn[tab] = true;
    ({ course: drawCourse, time: drawTime, config: drawConfig, rollouts: drawRollouts })[tab]();
  }
}
function redraw() {
  const now = document.querySelector('[role=tab][aria-selected="true"]').dataset.tab;
  for (const tab of Object.keys(drawn)) delete drawn[tab];
  open(now);
}
DATA.runs.forEach((run, index) => {
  const box = make("input", { type: "checkbox", checked: true, onchange: (event) => { shown[index] = event.target.checked; redraw(); } });
  const swatch = make("span", { className: "swatch" });
  swatch.style.background = COLOURS[index];
  $("runs").append(make("label", { title: run.folder }, box, swatch, run.name));
});

// -- charts

let charts = [];
function chart(place, group, x, series, options) {
  // series: [{label, values: [y] or [[low, y, high]], colour, dash, points}], each with its own x; they share one axis.
  const banded = series.some((one) => one.values.some(Array.isArray));
  const at = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const rows = new Map(at.map((x) => [x, [x, ...series.map(() => (banded ? [null, null, null] : null))]]));
  series.forEach((one, index) => one.values.forEach((y, i) => {
    const value = banded && !Array.isArray(y) ? [y, y, y] : y;
    rows.get(one.x[i])[index + 1] = value;
  }));
  const style = getComputedStyle(document.documentElement);
  const legend = make("div", { className: "legend" });
  const write = (i) => {
    const parts = series.map((one, index) => {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = one.colour;
      swatch.style.opacity = one.dash ? 0.5 : 1;
      let value = i === null ? null : rows.get(at[i])[index + 1];
      if (Array.isArray(value)) value = value[1];
      return make("span", {}, swatch, one.label + (value === null ? "" : " " + short(value)));
    });
    legend.replaceChildren(...(i === null ? [] : [x + " " + short(at[i])]), ...parts);
  };
  write(null);
  const box = make("div", { className: "chart" });
  place.append(box, legend);
  const touchless = { ...Dygraph.Interaction.defaultModel };
  for (const name of Object.keys(touchless)) if (name.startsWith("touch")) delete touchless[name]; // a finger scrolls
  const plot = new Dygraph(box, at.map((x) => rows.get(x)), {
    labels: ["x", ...series.map((_, index) => "s" + index)],
    colors: series.map((one) => one.colour),
    series: Object.fromEntries(series.map((one, index) => ["s" + index, { strokePattern: one.dash ? [5, 4] : null, drawPoints: !!one.points, pointSize: 3, strokeWidth: one.dash ? 1.2 : 1.8 }])),
    customBars: banded, connectSeparatedPoints: true, showLabelsOnHighlight: false, drawPoints: at.length < 2,
    axisLabelColor: style.getPropertyValue("--dim"), axisLineColor: style.getPropertyValue("--line"), gridLineColor: style.getPropertyValue("--line"),
    axisLabelFontSize: 11, rightGap: 8, includeZero: false, interactionModel: touchless, labelsKMB: true,
    highlightCallback: (event, value) => write(at.indexOf(value)), unhighlightCallback: () => write(null),
    drawCallback: (self, first) => { if (!first) together(self, group); },
    ...options,
  });
  charts.push({ plot, group });
}
let busy = false;
function together(from, group) {
  if (busy) return;
  busy = true;
  const range = from.xAxisRange();
  for (const { plot, group: other } of charts) if (plot !== from && other === group) plot.updateOptions({ dateWindow: range });
  busy = false;
}
function whole() {
  busy = true;
  for (const { plot } of charts) plot.resetZoom();
  busy = false;
}
function clear(group) {
  for (const one of charts) if (one.group === group) one.plot.destroy();
  charts = charts.filter((one) => one.group !== group);
}
function mean(values, width) {
  if (width < 2) return values;
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - (width >> 1)), i + (width >> 1) + 1).filter((one) => one !== null);
    if (value === null || !near.length) return null;
    if (!Array.isArray(value)) return near.reduce((a, b) => a + b, 0) / near.length;
    return value.map((_, k) => near.reduce((a, b) => a + b[k], 0) / near.length);
  });
}

// -- course

function drawCourse() {
  clear("course");
  $("panels").replaceChildren();
  const axis = $("axis").value, width = Number($("smooth").value);
  const several = shown.filter(Boolean).length > 1;
  $("findings").replaceChildren(...DATA.runs.flatMap((run, index) => !shown[index] ? [] : [
    ...(DATA.runs.length > 1 ? [make("h3", {}, run.name)] : []),
    ...run.findings.map(([question, answer, state]) => make("div", { className: "finding" }, make("b", {}, question), make("span", { className: state }, answer))),
  ]));
  for (const panel of DATA.panels) {
    const series = [];
    DATA.runs.forEach((run, index) => {
      if (!shown[index] || !run.steps.step) return;
      const x = run.steps[axis];
      panel.lines.forEach(([name, colour, label, dash], line) => {
        const column = run.steps[name];
        if (!column || column.every((one) => one === null)) return;
        const banded = run.steps[name + "_low"];
        const values = column.map((y, i) => (y === null ? null : banded ? [run.steps[name + "_low"][i], y, run.steps[name + "_high"][i]].map((v) => v * panel.scale) : y * panel.scale));
        const kept = values.map((y, i) => [x[i], y]).filter(([at]) => at !== null);
        series.push({ label: several ? run.name + ": " + label : label, x: kept.map((one) => one[0]), values: mean(kept.map((one) => one[1]), width), colour: several ? COLOURS[index] : colour, dash: dash || (several && line > 0) });
      });
      if (panel.evals && run.evals.length) {
        const at = run.evals.map(([step]) => place(run, axis, step));
        series.push({ label: (several ? run.name + ": " : "") + "held out", x: at, values: run.evals.map(([, rate, low, high]) => [low, rate, high]), colour: several ? COLOURS[index] : "#d1495b", points: true });
      }
    });
    if (!series.length) continue;
    const box = make("div", { className: "panel" }, make("h3", {}, panel.title));
    $("panels").append(box);
    const [low, high] = panel.limits;
    chart(box, "course", axis, series, { valueRange: [low, high], logscale: !!panel.log && series.every((one) => one.values.every((y) => y === null || y > 0)), underlayCallback: lines(axis) });
  }
  const events = DATA.runs.flatMap((run, index) => (shown[index] ? run.events.map((event) => [run, ...event]) : []));
  $("events").replaceChildren(...(events.length ? [] : [make("p", { className: "hint" }, "none")]), ...events.map(([run, minutes, level, text]) =>
    make("div", { className: { error: "bad", warning: "fair" }[level] || "" }, `${several ? run.name + ", " : ""}minute ${short(minutes)}: ${text}`)));
}
function place(run, axis, step) {
  // Where a step lies on an axis: the newest step record that is not behind it.
  let found = 0;
  run.steps.step.forEach((one, i) => { if (one <= step && run.steps[axis][i] !== null) found = run.steps[axis][i]; });
  return axis === "step" ? step : found;
}
function lines(axis) {
  return (canvas, area, plot) => DATA.runs.forEach((run, index) => {
    if (!shown[index] || !run.steps.step) return;
    for (const [minutes, level] of run.events) {
      let at = 0;
      run.steps.minutes.forEach((one, i) => { if (one <= minutes) at = run.steps[axis][i]; });
      const x = plot.toDomXCoord(axis === "minutes" ? minutes : at);
      if (x < area.x || x > area.x + area.w) continue;
      canvas.fillStyle = { error: "#b3261e", warning: "#c98a1b" }[level] || "#99a";
      canvas.globalAlpha = 0.5;
      canvas.fillRect(x, area.y, 1, area.h);
      canvas.globalAlpha = 1;
    }
  });
}

// -- time

function drawTime() {
  clear("time");
  $("strips").replaceChildren();
  $("bars").replaceChildren();
  DATA.runs.forEach((run, index) => {
    if (!shown[index] || !run.steps.step) return;
    if (DATA.runs.length > 1) $("strips").append(make("h2", {}, run.name));
    for (const [process, causes] of Object.entries(run.shares)) {
      const series = Object.entries(causes).map(([cause, values], i) => ({ label: cause, x: run.steps.minutes, values: values.map((y) => 100 * (y || 0)), colour: CAUSES[cause] || COLOURS[i % COLOURS.length] }));
      if (!series.length) continue;
      const box = make("div", { className: "panel strip" }, make("h3", {}, `${process}, % of its time`));
      $("strips").append(box);
      chart(box, "time", "minute", series, { stackedGraph: true, valueRange: [0, 105], fillAlpha: 0.6 });
    }
    const name = DATA.runs.length > 1 ? run.name + ": " : "";
    bars(name + "lag when trained, versions", Object.entries(run.lag), "of rollouts, by their oldest token");
    bars(name + "trained, by tenth of length", run.survival.map((share, tenth) => [tenth === 0 ? "shortest" : tenth === 9 ? "longest" : String(tenth + 1), share === null ? null : 100 * share]), "% of the finished rollouts");
    bars(name + "dropped rollouts", Object.entries(run.dropped), "by reason");
    bars(name + "seconds of a rollout", Object.entries(run.seconds_of_rollouts), "mean over the recorded ones: engine (generate), tools (step), start (reset)");
  });
}
function bars(title, rows, unit) {
  const known = rows.filter(([, value]) => value !== null);
  const most = Math.max(...known.map(([, value]) => value), 1e-12);
  $("bars").append(make("div", { className: "panel" }, make("h3", {}, title), make("div", { className: "hint" }, known.length ? unit : "none"), ...known.map(([name, value]) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${(70 * value) / most}%`;
    return make("div", { className: "row" }, make("span", {}, name), make("span", {}, bar, short(value)));
  })));
}

// -- configuration

function drawConfig() {
  const runs = DATA.runs.filter((_, index) => shown[index]);
  const only = $("differences").checked, several = runs.length > 1;
  $("config-hint").textContent = several ? "between the runs" : "from the defaults, which stand beside it";
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const rows = keys.filter((key) => !only || (several ? new Set(runs.map((run) => text(run.config[key]))).size > 1 : runs.some((run) => key in run.defaults)));
  const heads = ["setting", ...(several ? runs.map((run) => run.name) : ["value", "default"])];
  $("keys").replaceChildren(make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { className: "left" }, head)))), make("tbody", {}, ...rows.map((key) =>
    make("tr", {}, make("td", {}, key), ...(several ? runs.map((run) => make("td", {}, text(run.config[key]))) : runs.flatMap((run) => [make("td", {}, text(run.config[key])), make("td", {}, key in run.defaults ? text(run.defaults[key]) : "the same")]))))));
}

// -- rollouts

const NAMES = DATA.columns.map(([name]) => name);
let order = { column: 0, down: true }, visible = ROWS, current = null;
function drawRollouts() {
  if (!$("of-run").options.length) {
    DATA.runs.forEach((run, index) => $("of-run").append(make("option", { value: String(index) }, run.name)));
    chooseRun();
  }
  drawTable();
}
function chooseRun() {
  const run = DATA.runs[Number($("of-run").value)], ends = [...new Set(run.rows.map((row) => row[NAMES.indexOf("end")]))].sort();
  $("only-end").replaceChildren(make("option", { value: "" }, "any"), ...ends.map((end) => make("option", { value: end }, end)));
  $("notes").replaceChildren(...run.notes.map((note) => make("div", { className: "note" }, note)));
  if (!run.rows.length) $("notes").append(make("div", { className: "note" }, "This run recorded no rollouts: train with telemetry.keep_trajectories = N."));
  visible = ROWS;
}
function drawTable() {
  const run = DATA.runs[Number($("of-run").value)];
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const step = number("only-step"), low = number("reward-from"), high = number("reward-to"), end = $("only-end").value;
  const [atStep, atReward, atEnd] = ["step", "reward", "end"].map((name) => NAMES.indexOf(name));
  const found = run.rows.map((row, index) => [row, index]).filter(([row]) =>
    (step === null || row[atStep] === step) && (end === "" || row[atEnd] === end) && (low === null || row[atReward] >= low) && (high === null || (row[atReward] !== null && row[atReward] <= high)));
  const sign = order.down ? -1 : 1, by = order.column;
  found.sort(([a], [b]) => (a[by] === b[by] ? 0 : a[by] === null ? 1 : b[by] === null ? -1 : a[by] < b[by] ? -sign : sign));
  $("count").textContent = `${found.length} of ${run.rows.length} rollouts`;
  const head = make("tr", {}, ...DATA.columns.map(([name, meaning], column) => make("th", { title: meaning, className: name === "end" ? "left" : "" },
    make("button", { onclick: () => { order = { column, down: column === order.column ? !order.down : true }; drawTable(); } }, name + (column === by ? (order.down ? " ▾" : " ▴") : "")))));
  const body = found.slice(0, visible).map(([row, index]) => {
    const line = make("tr", { tabIndex: 0 }, ...row.map((value, column) => make("td", { className: column === atEnd ? "left" : "" }, short(value))));
    const choose = () => { document.querySelectorAll("tr.open").forEach((one) => one.classList.remove("open")); line.classList.add("open"); show(Number($("of-run").value), index); };
    line.addEventListener("click", choose);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    return line;
  });
  $("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  $("more").hidden = found.length <= visible;
}

// -- one rollout

async function unpacked(run, index) {
  const piece = $(`rollout-${run}-${index}`);
  if (!piece) return null;
  const bytes = Uint8Array.from(atob(piece.textContent), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
async function show(run, index) {
  const rollout = await unpacked(run, index), area = $("conversation");
  if (rollout === null) {
    area.replaceChildren(make("p", { className: "note" }, "There was no room for this rollout on the page: make the report with --megabytes, or of fewer steps."));
    return;
  }
  current = rollout;
  const kinds = { none: "who", advantage: "advantage", ratio: "ratio", gap: "log-prob gap", logprob: "log-prob", entropy: "entropy", value: "value", target: "target", version: "policy version", lag: "lag" };
  const before = document.getElementById("colour");
  const select = make("select", { id: "colour", onchange: paint }, ...Object.entries(kinds).map(([value, text]) => make("option", { value }, text)));
  if (before) select.value = before.value;
  const facts = [`task ${rollout.task}, attempt ${rollout.attempt} of ${rollout.env}`, `reward ${short(rollout.reward)}`, rollout.end.filter(Boolean).join(": "), ...rollout.turn_rewards.map(([segment, token, reward]) => `reward ${short(reward)} at token ${token} of segment ${segment}`), ...Object.entries(rollout.seconds).map(([name, s]) => `${name} ${short(s)} s`)];
  area.replaceChildren(
    make("h3", {}, `rollout ${rollout.id.slice(0, 8)}`), make("div", {}, facts.join(" · ")),
    make("details", {}, make("summary", { className: "hint" }, "what its environment and engine noted"), make("pre", { className: "block given" }, JSON.stringify(rollout.metadata, null, 1))),
    make("div", { className: "controls" }, make("label", {}, "colour by ", select), make("span", { className: "hint", id: "scale" }), make("span", { className: "hint" }, "Pale: given. Point at a token for its numbers.")),
    ...rollout.segments.flatMap((segment, at) => [make("div", { className: "cut" }, `segment ${at + 1} of ${rollout.segments.length}: ${segment.kind}, ${segment.tokens} tokens${segment.trained ? "" : ", left out of training"}`), body(segment, at)]));
  paint();
}
function body(segment, at) {
  let header = "";
  return make("div", { className: segment.kind }, ...segment.blocks.flatMap((block) => {
    if (block.part === "header") { header += block.text; return []; }
    const before = header ? [make("span", { className: "given" }, header)] : [];
    header = "";
    const who = { "": "given", assistant: block.pieces ? (segment.kind === "summary" ? "summary" : "policy") : "assistant" }[block.role] || block.role;
    const head = `${who}${block.part === "text" ? "" : ", " + (block.part === "call" ? "tool call" : block.part)} · ${block.tokens} tokens`;
    if (!block.pieces) {
      const text = make("span", {}, block.text.slice(0, MANY));
      const rest = block.text.length - MANY;
      const more = rest > 0 ? [make("button", { onclick: (event) => { text.textContent = block.text; event.target.remove(); } }, `all ${block.text.length} characters`)] : [];
      return make("div", { className: "block given" }, make("span", { className: "who" }, head), ...before, text, ...more);
    }
    const tokens = block.pieces.map((piece, i) => { const token = make("span", { className: "token" }, piece); token.at = [at, block.at + i]; return token; });
    if (block.part === "reasoning") return make("details", { className: "block sampled reasoning" }, make("summary", { className: "who" }, head), ...before, ...tokens);
    return make("div", { className: `block sampled ${block.part}` }, make("span", { className: "who" }, head), ...before, ...tokens);
  }));
}
function numbers([segment, i], name) {
  const of = current.segments[segment].numbers;
  if (name === "gap") return of.logprob && of.ratio && of.ratio[i] !== null ? Math.log(of.ratio[i]) : null;
  return of[name] ? of[name][i] : null;
}
function paint() {
  const name = $("colour").value, tokens = [...document.querySelectorAll(".token")];
  const values = tokens.map((token) => (name === "none" ? null : numbers(token.at, name))), known = values.filter((one) => one !== null);
  const centre = { ratio: 1 }[name] || 0, least = known.reduce((a, b) => Math.min(a, b), Infinity), top = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const two = ["advantage", "ratio", "gap"].includes(name), most = Math.max(Math.abs(least - centre), Math.abs(top - centre), 1e-12);
  tokens.forEach((token, i) => {
    const value = values[i];
    if (value === null) token.style.background = name === "none" ? "" : "transparent";
    else if (name === "version" || name === "lag") token.style.background = `hsl(${(value * 137) % 360} 60% 50% / 0.35)`;
    else if (two) token.style.background = `hsl(${value >= centre ? 145 : 5} 65% 45% / ${(0.6 * Math.abs(value - centre)) / most})`;
    else token.style.background = `hsl(215 75% 50% / ${top > least ? (0.6 * (value - least)) / (top - least) : 0.2})`;
  });
  $("scale").textContent = known.length ? `${short(least)} to ${short(top)}` : name === "none" ? "" : "not recorded";
}
function point(event) {
  const token = event.target.closest && event.target.closest(".token");
  $("pointer").hidden = !token;
  if (!token) return;
  const parts = ["id", "advantage", "value", "target", "ratio", "gap", "logprob", "entropy", "version", "lag"].map((name) => [name, numbers(token.at, name)]).filter(([, value]) => value !== null);
  $("pointer").textContent = `${JSON.stringify(token.textContent)}   ${parts.map(([name, value]) => `${name} ${short(value)}`).join("   ")}`;
}

// -- controls

for (const button of document.querySelectorAll("[role=tab]")) button.addEventListener("click", () => open(button.dataset.tab));
$("axis").addEventListener("change", drawCourse);
$("smooth").addEventListener("change", drawCourse);
$("unzoom").addEventListener("click", whole);
$("differences").addEventListener("change", drawConfig);
$("of-run").addEventListener("change", () => { chooseRun(); drawTable(); });
for (const id of ["only-step", "only-end", "reward-from", "reward-to"]) $(id).addEventListener("input", () => { visible = ROWS; drawTable(); });
$("more").addEventListener("click", () => { visible += ROWS; drawTable(); });
$("conversation").addEventListener("pointerover", point);
$("conversation").addEventListener("click", point);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
open("course");
