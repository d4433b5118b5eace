// Rollouts: the list, one as a conversation with coloured tokens, and two points on the same held-out task.
"use strict";

const COLOR_BY = { logp: "log-probability", trainer_logp: "trainer's log-probability", mismatch: "mismatch", advantages: "advantage", versions: "policy version" };
const COLUMNS = ["step", "split", "env", "task", "reward", "advantage", "outcome", "truncated", "turns", "completion_tokens", "mismatch", "mismatch_max", "why"];
const SORTED_BY = ["step", "reward", "advantage", "turns", "completion_tokens", "mismatch", "mismatch_max"];
const PAGE = 50;

function choice(label, values, chosen, change) {
  const options = ["", ...values].map((v) => el("option", { value: v, selected: v === chosen ? "" : null }, v || "all"));
  return el("label", {}, label + " ", el("select", { on: { change: (e) => change(e.target.value) } }, options));
}

async function rolloutsPage(query) {
  const asked = { sort: "step", order: "falling", first: "0", ...query, count: PAGE };
  const found = await ask("rollouts", asked);
  const go = (change) => { location.hash = link("rollouts", { ...query, first: "", ...change }); };
  const filters = ["split", "env", "outcome"].map((key) => choice(key, found.choices[key], query[key] || "", (v) => go({ [key]: v })));
  const step = el("label", {}, "step ", el("input", { size: 6, value: query.step || "", on: { change: (e) => go({ step: e.target.value }) } }));
  const headings = COLUMNS.map((key) => {
    if (!SORTED_BY.includes(key)) return key.replace("_", " ");
    const falls = asked.sort === key && asked.order === "falling";
    const mark = asked.sort === key ? (falls ? " ▼" : " ▲") : "";
    return el("a", { href: link("rollouts", { ...query, first: "", sort: key, order: falls ? "rising" : "falling" }) }, key.replace("_", " ") + mark);
  });
  const rows = found.entries.map((entry) => COLUMNS.map((key) =>
    key === "task" ? el("a", { href: link("rollout", { run: query.run, id: entry.id }) }, String(entry.task)) : entry[key] === true ? "yes" : entry[key] === false ? "" : entry[key]));
  const first = found.first, last = Math.min(first + PAGE, found.total);
  const pages = el("p", {}, `${found.total ? first + 1 : 0} to ${last} of ${found.total} `,
    first > 0 ? el("a", { href: link("rollouts", { ...query, first: Math.max(0, first - PAGE) }) }, "← before") : null, " ",
    last < found.total ? el("a", { href: link("rollouts", { ...query, first: first + PAGE }) }, "more →") : null);
  const faults = found.faults.map((why) => el("p", { class: "bad" }, why));
  return [el("div", { class: "filters" }, filters, step), faults, pages, table(headings, rows)];
}

// a value's place between the least and the most of its kind, as a colour
function shade(kind, value, low, high) {
  if (value === null || value === undefined) return "transparent";
  if (kind === "advantages") {
    const share = Math.min(1, Math.abs(value) / (Math.max(Math.abs(low), Math.abs(high)) || 1));
    return value >= 0 ? `rgba(5, 150, 105, ${0.1 + 0.5 * share})` : `rgba(220, 38, 38, ${0.1 + 0.5 * share})`;
  }
  if (kind === "versions") return `hsl(${(value * 67) % 360}, 70%, 80%)`;
  if (kind === "mismatch") return `rgba(220, 38, 38, ${Math.min(0.8, Math.sqrt(Math.max(0, value) / (high || 1)) * 0.8)})`;
  const share = Math.min(1, -value / 6);
  return `rgba(${Math.round(255 * share)}, ${Math.round(120 * (1 - share))}, ${Math.round(235 * (1 - share))}, ${0.12 + 0.5 * share})`;
}

function tokensOf(sample, kind) {
  const values = sample[kind], known = values.filter((v) => v !== null);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const nodes = sample.tokens.map((text, i) => {
    const told = Object.entries(COLOR_BY).map(([key, name]) => `${name}: ${figure(sample[key][i])}`).join("\n");
    return el("span", { class: sample.versions[i] === null ? "given" : "token", color: shade(kind, values[i], low, high),
      title: `token ${sample.ids[i]}\n${told}` }, text === "" ? "·" : text);
  });
  const range = known.length ? `${COLOR_BY[kind]} from ${figure(low)} to ${figure(high)}` : `no ${COLOR_BY[kind]} is known`;
  return el("div", {}, el("p", { class: "quiet" }, range), el("div", { class: "tokens" }, nodes));
}

// text with its tool calls in boxes
function said(content) {
  const parts = String(content ?? "").split(/(<tool_call>[\s\S]*?<\/tool_call>)/);
  return parts.filter((part) => part).map((part) => part.startsWith("<tool_call>") && part.endsWith("</tool_call>")
    ? el("div", { class: "tool-call" }, el("b", {}, "tool call"), el("pre", {}, part.slice(11, -12).trim())) : el("pre", {}, part));
}

function conversation(messages) {
  return (messages || []).map((message) => el("div", { class: "message " + (["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "") },
    el("b", {}, message.role), said(message.content),
    (message.tool_calls || []).map((call) => el("div", { class: "tool-call" }, el("b", {}, "tool call"), el("pre", {}, JSON.stringify(call, null, 1))))));
}

function about(found) {
  const keys = ["step", "split", "env", "task", "reward", "advantage", "outcome", "error", "truncated", "turns", "prompt_tokens", "completion_tokens", "mismatch", "mismatch_max", "why"];
  const facts = keys.filter((key) => found[key] !== null && found[key] !== undefined)
    .map((key) => [key.replace("_", " "), typeof found[key] === "number" ? figure(found[key]) : String(found[key])]);
  const measured = Object.entries(found.metrics || {}).map(([key, value]) => [key, figure(value)]);
  return el("p", { class: "facts" }, [...facts, ...measured].map(([key, value]) => el("span", {}, key + " ", el("b", { class: key === "outcome" ? "outcome " + (value === "policy" ? "" : "bad") : null }, value))));
}

async function rolloutPage(query) {
  const found = await ask("rollout", { run: query.run, id: query.id });
  const parts = [about(found)];
  if (found.samples.length) {
    const shown = el("div", {});
    const known = Object.entries(COLOR_BY).filter(([key]) => found.samples.some((sample) => sample[key].some((v) => v !== null)));
    const kind = COLOR_BY[query.color] ? query.color : "logp";
    const draw = (by) => shown.replaceChildren(...found.samples.map((sample) => tokensOf(sample, by)));
    const buttons = known.map(([key, name]) => el("button", { class: key === kind ? "chosen" : null, on: { click: (e) => {
      for (const other of e.target.parentNode.children) other.classList.remove("chosen");
      e.target.classList.add("chosen"); draw(key);
    } } }, name));
    draw(kind);
    parts.push(el("h2", {}, "tokens"), el("div", { class: "buttons" }, "colour by ", el("span", {}, buttons)), shown);
  }
  parts.push(el("h2", {}, "conversation"), conversation(found.messages));
  if (found.trace) parts.push(el("h2", {}, "trace"), el("pre", {}, found.trace));
  return parts;
}

async function comparePage(query, overview) {
  const names = overview.runs.filter((run) => !["missing", "not started", "refused"].includes(run.state)).map((run) => run.name);
  const one = query.one || names[0], other = query.other || names[1] || names[0];
  const go = (change) => { location.hash = link("compare", { one, other, ...change }); };
  const pick = [choice("left", names, one, (v) => go({ one: v })), choice("right", names, other, (v) => go({ other: v }))];
  if (!one) return [el("p", {}, "no run")];
  const { tasks } = await ask("tasks", { one, other });
  const chosen = tasks.find((t) => t.env === query.env && t.task === query.task) || tasks[0];
  if (!chosen) return [el("div", { class: "filters" }, pick), el("p", {}, "no held-out task of which both kept rollouts")];
  const label = (t) => `${t.env}: ${t.task}`;
  const select = el("label", {}, "task ", el("select", { on: { change: (e) => { const t = tasks[e.target.value]; go({ env: t.env, task: t.task }); } } },
    tasks.map((t, i) => el("option", { value: i, selected: t === chosen ? "" : null }, label(t)))));
  const sides = await Promise.all([one, other].map(async (run, side) => {
    const ids = chosen.rollouts[side], id = query["id" + side] || ids[0].id;
    const found = await ask("rollout", { run, id });
    const links = ids.map((r) => el("a", { class: String(r.id) === String(id) ? "chosen" : null, href: link("compare", { ...query, one, other, env: chosen.env, task: chosen.task, ["id" + side]: r.id }) }, `step ${r.step}: ${figure(r.reward)}`));
    return el("section", {}, el("h2", {}, el("a", { href: link("run", { run }) }, run)), el("p", { class: "links" }, links), about(found), conversation(found.messages),
      found.samples.map((sample) => tokensOf(sample, "logp")));
  }));
  return [el("div", { class: "filters" }, pick, select), el("div", { class: "sides" }, sides)];
}
