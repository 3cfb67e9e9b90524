// Names of classes may wrap between their words, wide tables are set smaller, and a field above each long table filters its rows.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const rows = [...table.tBodies[0].rows];
    for (const row of rows)
      for (const cell of row.cells) cell.innerHTML = cell.innerHTML.replace(/(?<=[a-z0-9_])(?=[A-Z])(?![^<]*>)/g, "<wbr>");
    const frame = table.closest(".table-wrapper");
    if (frame?.scrollWidth > frame?.clientWidth) table.style.zoom = (0.95 * frame.clientWidth) / frame.scrollWidth; // no scroll bar
    if (rows.length < 60) continue;
    const field = Object.assign(document.createElement("input"), { className: "filter", type: "search", placeholder: "Search the table" });
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
    (frame ?? table).before(field);
  }
});
