"use strict";
// Hover: any element with data-tip, and boxes that name their text by number (data-n).
const tip = document.getElementById("tip");
const block = document.getElementById("names");
const names = block ? JSON.parse(block.textContent) : [];

function tipOf(element) {
  if (element.dataset.tip) return element.dataset.tip;
  return `${names[Number(element.dataset.n)]}\n${element.dataset.d}`;
}

document.addEventListener("pointermove", (event) => {
  const found = event.target.closest && event.target.closest("[data-tip], [data-n]");
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = tipOf(found);
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 6);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 8}px`;
});
document.documentElement.addEventListener("pointerleave", () => { tip.hidden = true; });

// Sorting: a click on a heading sorts, a second one turns the order round.
function valueOf(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
}

function sort(heading) {
  const table = heading.closest("table");
  const headings = [...heading.parentNode.children];
  const column = headings.indexOf(heading);
  const down = heading.getAttribute("aria-sort") !== "descending";
  const body = table.tBodies[0];
  const rows = [...body.rows].filter((row) => !row.classList.contains("sum"));
  const sums = [...body.rows].filter((row) => row.classList.contains("sum"));
  rows.sort((a, b) => {
    const [x, y] = [valueOf(a, column), valueOf(b, column)];
    const numbers = typeof x === "number" && typeof y === "number";
    const order = numbers ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return down ? -order : order;
  });
  headings.forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows, ...sums);
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}
