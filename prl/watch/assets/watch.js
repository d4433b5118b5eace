// The page: what the address names is asked for, drawn, and, where it may change, asked for again.
"use strict";

const AGAIN_MS = 3000;
let drawn = 0, timer = null, before = "";

function stateOf(state) { return el("span", { class: "state " + String(state).replace(/\W/g, "-") }, state); }

// why it failed, or what is wrong with it while it goes on
function reasons(run) {
  const alarms = (run.alarms || []).map((alarm) => alarm.kind);
  return run.why || [alarms.length ? `alarms: ${alarms.join(", ")}` : "", run.lost_rollouts].filter(Boolean).join("; ");
}

function runRows(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.swept || {})))];
  const headings = ["run", "state", ...keys, "step", "reward", "held-out", "loss", "tokens/s", "staleness", "mismatch", "why"];
  return table(headings, runs.map((run) => [
    run.step === undefined ? run.name : el("a", { href: link("run", { run: run.name }) }, run.name),
    stateOf(run.state), ...keys.map((key) => (run.swept || {})[key] ?? ""), run.max_steps ? `${run.step}/${run.max_steps}` : "",
    ...["reward", "eval/reward", "loss", "tokens_per_s", "staleness_mean", "mismatch_kl_mean"].map((key) => run.figures[key] ?? ""),
    el("span", { class: "why", title: reasons(run) }, reasons(run))]));
}

async function overviewPage() {
  const found = await ask("overview");
  const sweeps = new Map();
  for (const run of found.runs) sweeps.set(run.sweep, [...(sweeps.get(run.sweep) || []), run]);
  const counts = (runs) => Object.entries(runs.reduce((a, r) => ({ ...a, [r.state]: (a[r.state] || 0) + 1 }), {})).map(([s, n]) => el("span", {}, stateOf(s), ` ${n} `));
  return [el("h1", {}, found.root), (found.faults || []).map((why) => el("p", { class: "bad" }, why)), [...sweeps].map(([sweep, runs]) => el("section", {},
    el("h2", {}, runs.length > 1 ? el("a", { href: link("sweep", { sweep }) }, sweep === "." ? "runs" : sweep) : sweep === "." ? "" : sweep, " ", counts(runs)), runRows(runs)))];
}

async function sweepPage(query) {
  const [found, overview] = await Promise.all([ask("sweep", { sweep: query.sweep }), ask("overview")]);
  const runs = overview.runs.filter((run) => run.sweep === query.sweep);
  return [el("p", {}, el("a", { href: link("compare", { one: runs[0]?.name, other: runs[1]?.name }) }, "two points side by side"),
    el("span", { class: "quiet" }, "  bands: Student's 95 % interval of the mean over seeds")),
  found.faults.map((why) => el("p", { class: "bad" }, why)), el("div", { class: "charts" }, found.charts.map((one) => chart(one.title, one.lines))), runRows(runs)];
}

async function runPage(query) {
  const [found, step] = await Promise.all([ask("run", { run: query.run }), ask("steps", { run: query.run, step: query.step || "" }).catch((error) => ({ step: null, error: error.message }))]);
  const state = found.state;
  const facts = [el("p", {}, stateOf(state.state), ` step ${state.step}/${state.max_steps ?? "?"}  ${state.doing ? state.doing + "  " : ""}`, el("a", { href: link("rollouts", { run: query.run }) }, "rollouts"), " · ", el("a", { href: link("compare", { one: query.run }) }, "side by side with another")),
    el("p", { class: "facts" }, Object.entries(state.roles).map(([name, role]) => el("span", {}, name + " ", el("b", {}, role))))];
  for (const alarm of state.alarms || []) facts.push(el("p", { class: "bad" }, `alarm ${alarm.kind} since step ${alarm.since}: ${alarm.message}`));
  for (const [url, why] of Object.entries(state.lost_engines || {})) facts.push(el("p", { class: "bad" }, `engine ${url} is left out: ${why}`));
  if (state.lost_rollouts) facts.push(el("p", { class: "bad" }, state.lost_rollouts));
  if (state.why) facts.push(el("p", { class: "bad" }, state.why), el("pre", {}, (state.log_tail || []).join("\n")));
  if (step.error) facts.push(el("p", { class: "bad" }, step.error + " ", el("a", { href: link("run", { run: query.run }) }, "newest")));
  if (step.step !== null) {
    const go = (to) => link("run", { run: query.run, step: to });
    facts.push(el("h2", {}, `who waits for whom: step ${step.step} `,
      step.step > step.steps[0] ? el("a", { href: go(step.step - 1) }, "←") : null, " ", step.step < step.steps[1] ? el("a", { href: go(step.step + 1) }, "→") : null,
      query.step ? el("span", {}, " ", el("a", { href: go("") }, "newest")) : null), timelineOf(step));
  }
  return [...facts, el("div", { class: "charts" }, found.charts.map((one) => chart(one.title, one.lines)))];
}

const PAGES = {
  overview: { draw: overviewPage, live: true }, sweep: { draw: sweepPage, live: true }, run: { draw: runPage, live: true },
  rollouts: { draw: rolloutsPage, live: false }, rollout: { draw: rolloutPage, live: false },
  compare: { draw: async (query) => comparePage(query, await ask("overview")), live: false },
};

function trail(view, query) {
  const parts = [];
  if (view === "sweep") parts.push(query.sweep);
  if (query.run) parts.push(el("a", { href: link("run", { run: query.run }) }, query.run));
  if (view === "rollouts" || view === "rollout") parts.push(el("a", { href: link("rollouts", { run: query.run }) }, "rollouts"));
  if (view === "rollout") parts.push(query.id);
  if (view === "compare") parts.push("side by side");
  return parts.flatMap((part) => [" › ", part]);
}

async function draw() {
  const mine = ++drawn, { view, query } = place(), page = document.getElementById("page"), live = document.getElementById("live");
  clearTimeout(timer);
  const known = Object.hasOwn(PAGES, view) ? PAGES[view] : PAGES.overview;
  document.getElementById("trail").replaceChildren(...trail(view, query));
  if (before !== location.hash) live.textContent = "loading …";
  try {
    const parts = (await known.draw(query)).flat(Infinity);
    if (mine !== drawn) return;
    const top = before === location.hash ? scrollY : 0;
    page.replaceChildren(...parts);
    page.dataset.view = view;
    scrollTo(0, top);
    live.textContent = known.live ? "live" : "";
  } catch (error) {
    if (mine !== drawn) return;
    if (before !== location.hash || !page.childElementCount) page.replaceChildren(el("p", { class: "bad" }, error.message));
    live.textContent = "not live: " + error.message;
  }
  before = location.hash;
  if (known.live) timer = setTimeout(draw, AGAIN_MS);
}

addEventListener("hashchange", draw);
draw();
