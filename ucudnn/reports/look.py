"""Style and script of the pages: light and dark, tables that sort and filter, choice of a kernel.

They are part of the page, which loads nothing from elsewhere.
"""

from __future__ import annotations

FONT = "system-ui, sans-serif"
# A frame that scrolls has a shadow at each end beyond which there is more.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --faint: #5c5c5c; --line: #ddd;
  --card: #f5f6f8; --mark: #0067a5 }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --text: #e8e8e8; --faint: #a6a6a6;
  --line: #3a3d44; --card: #20242a; --mark: #6cb6f0 } }
* { box-sizing: border-box }
body { font: 14px/1.5 FONT; margin: 0 auto; max-width: 1320px;
  padding: 1.5em 1em 4em; background: var(--page); color: var(--text) }
h1 { margin: 0; overflow-wrap: anywhere; font-size: clamp(1.3rem, 5vw, 2rem) }
h2 { margin: 2em 0 .3em } p { margin: .4em 0 }
.under { color: var(--faint) } a { color: var(--mark) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: .8em;
  margin: 1em 0 }
.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .7em .9em }
.cards b { display: block; font-size: 1.2em; font-weight: 600 }
.cards span { color: var(--faint) }
ul { margin: .4em 0; padding-left: 1.3em } summary { cursor: pointer }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1.2em }
dt { color: var(--faint) } dd { margin: 0; overflow-wrap: anywhere }
nav { display: flex; flex-wrap: wrap; gap: .2em 1em; margin: 1em 0 }
.wide { overflow-x: auto }
.tall { max-height: 36rem; overflow-y: auto; border: 1px solid var(--line); border-radius: 6px;
  background: linear-gradient(var(--page) 40%, transparent) top / 100% 3em no-repeat local,
    linear-gradient(transparent, var(--page) 60%) bottom / 100% 3em no-repeat local,
    linear-gradient(rgba(0,0,0,.18), transparent) top / 100% 10px no-repeat scroll,
    linear-gradient(transparent, rgba(0,0,0,.18)) bottom / 100% 10px no-repeat scroll }
@media print { .tall { max-height: none } }
table { border-collapse: collapse; font-size: 12px }
th, td { border-bottom: 1px solid var(--line); padding: .25em .6em; text-align: left;
  vertical-align: top }
.sortable th { position: sticky; top: 0; background: var(--page); white-space: nowrap }
.sortable th button { all: unset; cursor: pointer; font-weight: 600 }
.sortable th button:focus-visible { outline: 2px solid var(--mark) }
th[aria-sort=ascending] button::after { content: " \\25B2" }
th[aria-sort=descending] button::after { content: " \\25BC" }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
#kernels td:nth-child(2), #candidates td:nth-child(2) { white-space: nowrap }
#kernels td { min-width: 4em } #kernels td:last-child { min-width: 16em }
#kernels td:nth-child(11), #candidates td:nth-child(3), #candidates td:last-child {
  min-width: 13em }
input, select { font: inherit; max-width: 100%; padding: .1em .3em }
.js-plotly-plot .main-svg text { fill: var(--text) !important }
.js-plotly-plot .hoverlayer text { fill: #111 !important }
.js-plotly-plot .main-svg text.bartext-inside { fill: #111 !important }
""".replace("FONT", FONT)

SCRIPT = """
"use strict";
const rowsOf = table => Array.from(table.tBodies[0].rows);
const chosen = document.getElementById("kernel");
function show(table) {
  const input = document.querySelector(`input[data-table=${table.id}]`);
  const words = input.value.toLowerCase().split(/ +/);
  const of = table.id === "candidates" && chosen && !chosen.disabled ? chosen.value : "";
  let shown = 0;
  for (const row of rowsOf(table)) {
    const text = row.textContent.toLowerCase();
    row.hidden = (of !== "" && row.cells[0].textContent !== of)
      || !words.every(word => text.includes(word));
    shown += !row.hidden;
  }
  document.querySelector(`output[for=${table.id}]`).value = `${shown} of ${rowsOf(table).length}`;
}
function sort(table, heading) {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[heading.cellIndex].dataset.key;
  const text = row => row.cells[heading.cellIndex].textContent;
  const order = (a, b) => key(a) === undefined ? text(a).localeCompare(text(b)) : key(a) - key(b);
  table.tBodies[0].append(...rowsOf(table).sort((a, b) => up ? order(a, b) : order(b, a)));
}
for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells)
    heading.firstChild.addEventListener("click", () => sort(table, heading));
  document.querySelector(`input[data-table=${table.id}]`)
    .addEventListener("input", () => show(table));
  show(table);
}
const drawn = document.getElementById("fronts");
if (chosen && drawn) {
  const fronts = JSON.parse(drawn.textContent);
  chosen.addEventListener("change", () => {
    const front = fronts[chosen.value];
    if (front) Plotly.react("Fronts", front.data, front.layout);
    show(document.getElementById("candidates"));
  });
}
"""
