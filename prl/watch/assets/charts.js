// Curves with their intervals, and a step's timeline, as SVG.
"use strict";

const COLORS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#57534e"];
const DASHES = [null, "7 3", "2 2.5", "9 3 2 3"]; // once all colours are taken: 36 lines are told apart
const WIDTH = 420, HEIGHT = 190, LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 22;

function lineStyle(index) {
  return { stroke: COLORS[index % COLORS.length], "stroke-width": 1.6,
    "stroke-dasharray": DASHES[Math.floor(index / COLORS.length) % DASHES.length] };
}

function lineKey(index) {
  return el("svg", { class: "key", viewBox: "0 0 26 10" }, el("line", { x1: 0, x2: 26, y1: 5, y2: 5, ...lineStyle(index), "stroke-width": 2.4 }));
}

function ticks(low, high) {
  const rough = (high - low) / 4 || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// points: [step, value] or [step, mean, half width or null, seeds]
function chart(title, lines) {
  const all = lines.flatMap((line) => line.points);
  const values = all.flatMap((p) => [p[1] - (p[2] || 0), p[1] + (p[2] || 0)]);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (high === low) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  const first = all.reduce((a, p) => Math.min(a, p[0]), Infinity);
  const last = Math.max(first + 1, all.reduce((a, p) => Math.max(a, p[0]), -Infinity));
  const x = (step) => LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const at of ticks(low, high)) {
    svg.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      el("text", { class: "tick", x: LEFT - 4, y: y(at) + 3, "text-anchor": "end" }, figure(at)));
  }
  for (const at of ticks(first, last).filter(Number.isInteger)) {
    svg.append(el("text", { class: "tick", x: x(at), y: HEIGHT - 6, "text-anchor": x(at) > WIDTH - RIGHT - 10 ? "end" : "middle" }, figure(at)));
  }
  lines.forEach((line, index) => {
    const color = COLORS[index % COLORS.length];
    const banded = line.points.filter((p) => p[2] !== null && p[2] !== undefined);
    if (banded.length > 1) {
      const over = banded.map((p) => `${x(p[0])},${y(p[1] + p[2])}`), under = banded.map((p) => `${x(p[0])},${y(p[1] - p[2])}`);
      svg.append(el("polygon", { points: [...over, ...under.reverse()].join(" "), fill: color, "fill-opacity": 0.15 }));
    }
    const way = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    svg.append(el("path", { d: way, fill: "none", ...lineStyle(index) }));
    if (line.points.length < 30) for (const p of line.points) {
      svg.append(el("circle", { cx: x(p[0]), cy: y(p[1]), r: 2, fill: color }));
    }
  });
  const readout = el("div", { class: "readout" });
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = first + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    readout.textContent = lines.map((line) => {
      const p = line.points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
      return `${line.name}: ${figure(p[1])}${p[2] ? " ± " + figure(p[2]) : ""} at ${p[0]}`;
    }).join("   ");
  });
  const names = lines.map((line, i) => el("span", { class: "name" }, lineKey(i), line.name));
  return el("figure", {}, el("figcaption", {}, title), svg, el("div", { class: "names" }, names), readout);
}

const SPAN_COLORS = {
  "waits for a batch": "#f59e0b", "waits for rollouts": "#fbbf24", "a batch waits for the trainer": "#f97316",
  "forward, backward": "#2563eb", optimizer: "#1e40af", "publishes weights": "#7c3aed", checkpoint: "#57534e",
  generates: "#059669", "takes new weights": "#a855f7", evaluates: "#0891b2",
};

function timelineOf(found) {
  const width = 900, left = 215, row = 26, height = found.rows.length * row + 24;
  const x = (s) => left + s / found.seconds * (width - left - 10);
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, class: "timeline", role: "img" });
  found.rows.forEach((one, index) => {
    const top = index * row + 2;
    svg.append(el("text", { class: "role", x: left - 8, y: top + 15, "text-anchor": "end" }, one.role),
      el("rect", { class: "lane", x: left, y: top, width: width - left - 10, height: row - 4 }));
    for (const [from, to, what] of one.spans) {
      svg.append(el("rect", { x: x(from), y: top, width: Math.max(0.8, x(to) - x(from)), height: row - 4,
        fill: SPAN_COLORS[what] || "#999" }, el("title", {}, `${what}: ${figure(to - from)} s, from ${figure(from)} s`)));
    }
  });
  for (const at of ticks(0, found.seconds)) {
    svg.append(el("text", { class: "tick", x: x(at), y: height - 6, "text-anchor": "middle" }, figure(at) + " s"));
  }
  const seen = new Set(found.rows.flatMap((one) => one.spans.map((s) => s[2])));
  const names = [...seen].map((what) => {
    const total = found.rows.flatMap((one) => one.spans).filter((s) => s[2] === what).reduce((a, s) => a + s[1] - s[0], 0);
    return el("span", { class: "name" }, el("i", { color: SPAN_COLORS[what] || "#999" }), `${what} ${figure(total)} s`);
  });
  return el("div", {}, svg, el("div", { class: "names" }, names));
}
