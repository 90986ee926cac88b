"use strict";
// Live charts, deferred details of many runs, sorting, theme and search.
// Without scripts the page shows its tables and static pictures.

const UNKNOWN = "–"; // a table's text for a missing value
const SECONDS = { s: 1, min: 60, h: 3600, days: 86400 }; // in each unit of a duration
const DRAW_MARGIN = "300px"; // a chart is drawn when it is this close to the window

// ---- data: JSON, compressed by zlib, in base64 (PageCharts.payload)

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(text).json();
}

function insertDeferred(deferred) {
  for (const placeholder of document.querySelectorAll("[data-deferred]")) {
    placeholder.outerHTML = deferred[placeholder.dataset.deferred];
  }
}

// Rows of a chart's table: objects with its columns as keys.
function listRows(columns) {
  const names = Object.keys(columns);
  const nRows = names.length ? columns[names[0]].length : 0;
  const rows = [];
  for (let index = 0; index < nRows; index++) {
    rows.push(Object.fromEntries(names.map((name) => [name, columns[name][index]])));
  }
  return rows;
}

// ---- CSV and SVG of a chart

function toCsvCell(value) {
  // a spreadsheet would evaluate such a text; FORMULA_STARTS in page_charts.py has the same
  const isFormula = typeof value === "string" && /^[-=+@\t\r]/.test(value);
  const text = isFormula ? `'${value}` : String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function toCsv({ columns, textsByCode }) {
  const names = Object.keys(columns);
  const lines = [names];
  for (const row of listRows(columns)) {
    // a column of codes has texts; code -1 is the last one, as for `at`
    const toValue = (name) => (name in textsByCode ? textsByCode[name].at(row[name]) : row[name]);
    lines.push(names.map(toValue));
  }
  return lines.map((line) => line.map(toCsvCell).join(",")).join("\n") + "\n";
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function makeButton(text, label, onClick) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}

function makeTools(chart, view) {
  const file = chart.title.replace(/[^\w.-]+/g, "_");
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(
    makeButton("CSV", `data of ${chart.title}`, () => {
      download(`${file}.csv`, "text/csv", toCsv(chart));
    }),
    makeButton("SVG", `picture of ${chart.title}`, async () => {
      download(`${file}.svg`, "image/svg+xml", await view.toSVG());
    }),
  );
  return tools;
}

// ---- live charts

async function drawChart(figure, chart) {
  const live = document.createElement("div");
  live.className = "live";
  figure.append(live);
  const spec = { ...chart.spec, width: "container", data: { values: listRows(chart.columns) } };
  // ast: expressions are interpreted, so that the page's policy need not allow eval
  const options = { actions: false, ast: true, renderer: chart.canvas ? "canvas" : "svg" };
  const { view } = await window.vegaEmbed(live, spec, options);
  figure.classList.add("drawn");
  figure.append(makeTools(chart, view));
}

function drawChartsOnScroll(charts) {
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      drawChart(target, charts[target.dataset.chart]).catch((error) => console.error(error));
    }
  }, { rootMargin: DRAW_MARGIN });
  for (const figure of document.querySelectorAll("figure.chart")) observer.observe(figure);
}

// ---- tables

// The number at the beginning of a cell, such as 1,200, 95 % or 0.912 ± 0.010; durations such as
// 12 min in seconds; NaN for other texts.
function toNumber(text) {
  const [number, unit] = text.replaceAll(",", "").split(/\s+/);
  return number === "" ? NaN : Number(number) * (SECONDS[unit] ?? 1);
}

// Comparison for Array.sort. In both directions, texts follow numbers, and unknown values are last.
function compareCells(a, b, isDescending) {
  if (a === UNKNOWN || b === UNKNOWN) return (a === UNKNOWN) - (b === UNKNOWN);
  const aIsText = Number.isNaN(toNumber(a));
  const bIsText = Number.isNaN(toNumber(b));
  if (aIsText !== bIsText) return aIsText - bIsText;
  const order = aIsText ? a.localeCompare(b) : toNumber(a) - toNumber(b);
  return isDescending ? -order : order;
}

function sortTable(table, headings, column) {
  const heading = headings[column];
  const isDescending = heading.getAttribute("aria-sort") !== "descending";
  for (const other of headings) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  const read = ({ cells }) => cells[column].dataset.value ?? cells[column].textContent.trim();
  const body = table.tBodies[0];
  const sorted = [...body.rows].sort((a, b) => compareCells(read(a), read(b), isDescending));
  body.append(...sorted);
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const text = heading.textContent;
    const sort = () => sortTable(table, headings, column);
    heading.replaceChildren(makeButton(text, `sort by ${text}`, sort));
  });
}

function addSearch() {
  const search = document.getElementById("search");
  search.hidden = false;
  search.addEventListener("input", () => {
    const text = search.value.trim().toLowerCase();
    for (const row of document.querySelectorAll("tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(text);
    }
  });
}

// ---- theme

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

// True for the dark theme: the one that was chosen with the button, otherwise the system's.
function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : systemIsDark.matches;
}

function addThemeButton() {
  const button = document.getElementById("theme");
  const showState = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    showState();
  });
  systemIsDark.addEventListener("change", showState);
  showState();
  button.hidden = false;
}

async function main() {
  addThemeButton();
  addSearch();
  try {
    const { charts, deferred } = await unpack(document.getElementById("payload").textContent);
    insertDeferred(deferred);
    drawChartsOnScroll(charts);
  } finally {
    // deferred details have tables too, but other tables can be sorted without them
    document.querySelectorAll("table.sortable").forEach(makeSortable);
  }
}

main().catch((error) => console.error(error));
