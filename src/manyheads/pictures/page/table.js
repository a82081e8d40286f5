// Tables that are sorted by the column whose title is clicked.

export function startSorting(table) {
  for (const title of table.tHead.rows[0].cells) title.addEventListener("click", () => sortTable(table, title));
}

function sortTable(table, title) {
  const titles = [...table.tHead.rows[0].cells];
  const column = titles.indexOf(title);
  const down = title.getAttribute("aria-sort") !== "descending";
  titles.forEach((cell) => cell.setAttribute("aria-sort", cell === title ? (down ? "descending" : "ascending") : "none"));
  const rows = [...table.tBodies[0].rows];
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    // Text ascending from A, numbers descending.
    const order = Number.isNaN(Number(a)) ? a.localeCompare(b) : Number(b) - Number(a);
    return down ? order : -order;
  });
  table.tBodies[0].append(...rows);
}
