// Elements from names, attributes and text. Text is always a text node: what a model says is never read as markup.
"use strict";

function el(name, attributes, ...children) {
  const isSvg = ["svg", "path", "line", "text", "rect", "circle", "g", "title", "polygon"].includes(name);
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (key === "color") node.style.backgroundColor = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e3) return (value / 1e3).toPrecision(4) + "k";
  return size < 1e-3 && size > 0 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function table(headings, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, headings.map((h, i) =>
      el("th", { class: rows.some((row) => typeof row[i] === "number") ? "number" : null }, h)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) =>
      el("td", { class: typeof cell === "number" ? "number" : null }, typeof cell === "number" ? figure(cell) : cell))))));
}

// "#/view?key=value" and back
function link(view, query) {
  const words = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v !== "" && v !== undefined && v !== null));
  const text = words.toString();
  return "#/" + view + (text ? "?" + text : "");
}

function place() {
  const [view, words] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "overview", query: Object.fromEntries(new URLSearchParams(words || "")) };
}

async function ask(view, query) {
  const answer = await fetch("/api/" + view + "?" + new URLSearchParams(query || {}), { credentials: "same-origin" });
  if (answer.status === 401) throw new Error("the server was started again: open the link that it has printed");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}
