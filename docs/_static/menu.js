// The menu shows where the reader is: the reference has more entries than a window is high.
const menu = document.querySelector(".sidebar-scroll");
const current = menu?.querySelector(".current-page");
if (current && current.offsetTop > menu.clientHeight) {
    menu.scrollTop = current.offsetTop - menu.clientHeight / 2;
}
