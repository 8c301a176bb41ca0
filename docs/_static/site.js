// The menu shows where the reader is: the reference has more entries than a window is high.
const menu = document.querySelector(".sidebar-scroll");
const current = menu?.querySelector(".current-page");
if (current && current.offsetTop > menu.clientHeight) {
    menu.scrollTop = current.offsetTop - menu.clientHeight / 2;
}

// On a phone each cell names its column.
for (const table of document.querySelectorAll("article table")) {
    const titles = [...(table.tHead?.rows[0].cells ?? [])].map(cell => cell.textContent);
    for (const cell of table.querySelectorAll("td:not(:first-child)")) {
        if (cell.textContent) cell.dataset.title = titles[cell.cellIndex] ?? "";
    }
}
