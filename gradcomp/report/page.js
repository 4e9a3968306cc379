// Draws every chart of the page from its specification, and makes tables sortable.
"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const ink = {
  labelColor: "currentColor", titleColor: "currentColor", titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12,
};
const config = {
  background: null,
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: { ...ink, domainColor: "currentColor", tickColor: "currentColor", gridColor: "currentColor", gridOpacity: 0.14 },
  axisQuantitative: { tickCount: 5, labelOverlap: true },
  axisBand: { grid: false },
  legend: { ...ink, symbolType: "square" },
};
const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
const options = { mode: "vega-lite", renderer: "svg", actions: false, config, tooltip: { theme } };
const charts = Object.entries(read("charts")).map(([id, spec]) => vegaEmbed(document.getElementById(id), spec, options));
Promise.all(charts).then(
  () => { document.documentElement.dataset.ready = Math.round(performance.now()); },
  (error) => { console.error(error); document.documentElement.dataset.failed = String(error); },
);

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    head.firstElementChild.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") !== "descending";
      for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = head.classList.contains("number")
        ? (a, b) => Number(value(a) || -1) - Number(value(b) || -1)
        : (a, b) => value(a).localeCompare(value(b));
      const rows = [...body.rows].sort((a, b) => (falls ? compare(b, a) : compare(a, b)));
      body.append(...rows);
    });
  }
}
