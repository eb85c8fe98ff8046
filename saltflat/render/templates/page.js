"use strict";
// Tables that sort, a choice of the gap that all sections follow, and details that are open on paper.
(() => {
  const cellKey = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.order ?? cell.textContent.trim();
    if (text === "" || text === "undefined") return null;
    const number = Number(text);
    return Number.isNaN(number) ? text : number;
  };

  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });

  const sortBy = (table, column, head) => {
    const numeric = head.classList.contains("n");
    const before = head.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const direction = before === "none" ? first : before === "ascending" ? "descending" : "ascending";
    for (const each of table.tHead.rows[0].cells) if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [cellKey(row, column), row]);
    // What has no value is last either way.
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const label = head.querySelector(".head");
      if (!label) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "head";
      button.append(...label.childNodes);
      button.addEventListener("click", () => sortBy(table, column, head));
      label.replaceWith(button);
      head.setAttribute("aria-sort", "none");
    });
  }

  const choices = [...document.querySelectorAll("select.gap-choice")];
  const choose = (gap) => {
    for (const each of choices) each.value = gap;
    for (const each of document.querySelectorAll(".by-gap")) each.classList.toggle("chosen", each.dataset.gap === gap);
    document.dispatchEvent(new CustomEvent("gap", { detail: gap }));
  };
  for (const each of choices) {
    each.selectedIndex = 0; // browsers remember choices over reloads
    each.addEventListener("change", () => choose(each.value));
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
  });
})();
