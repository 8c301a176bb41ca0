"""The built site (`make docs`): its files, and how a reader meets it in headless Chromium.

With `TRITONCLIP_SCREENSHOTS=FOLDER` each page is also drawn into that folder.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest

import tritonclip

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
SITE = ROOT / "build" / "docs"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OFF = ("quic", "background-networking", "component-update")
FLAGS = [*(f"--disable-{one}" for one in OFF), "--no-sandbox"]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
# Pixels, on a phone, of one of the four pages of figures whose tables are folded.
LONGEST = 7000
# Wider than the window, a table that runs out of the column of the text, or a cell whose text is
# seen only after scrolling; all that is folded is opened.
OVERFLOWS = """() => {
    for (const part of document.querySelectorAll('details')) part.open = true
    const right = document.querySelector('article').getBoundingClientRect().right + 1
    const hidden = cell => {
        const text = document.createRange()
        text.selectNodeContents(cell)
        return [...text.getClientRects()].some(box => box.width && box.right > right)
    }
    const outside = element => {
        for (let box = element; box.tagName != 'ARTICLE'; box = box.parentElement)
            if (getComputedStyle(box).overflowX != 'visible' && box != element) return false
        return element.getBoundingClientRect().right > right
    }
    const wide = [...document.querySelectorAll('article table, article pre, article img')]
    const page = document.documentElement
    return [
        ...wide.filter(outside).map(e => e.outerHTML.slice(0, 200)),
        ...[...document.querySelectorAll('article :is(td, th)')].filter(hidden)
            .map(cell => `a cell goes on beyond the edge: ${cell.textContent}`),
        ...(page.scrollWidth > page.clientWidth ? ['the page itself'] : []),
    ]
}"""

pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(not SITE.exists(), reason="needs the site that `make docs` builds"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs no request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs tritonclip[dev]")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def _pages() -> list[str]:
    """Every page that a reader opens; of the reference, all."""
    return sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html"))


class Page(HTMLParser):
    """The links of a page, to pages, images, styles and scripts, and the anchors within it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value}
        self.links |= {found[name] for name in ("href", "src") if name in found}
        self.anchors.add(found.get("id", ""))


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in SITE.rglob("*.html")}


def test_links_within_the_site_lead_to_a_file_and_an_anchor(pages):
    lost = set()
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / address.partition("?")[0]).resolve() if address else path
            # viewcode's links back have one name for all of a module, whichever page it is on.
            known = (
                pages[target].anchors if target in pages and "_modules" not in path.parts else {}
            )
            if not target.exists() or (known and anchor not in known):
                lost.add((str(path.relative_to(SITE)), link))
    assert not lost


def test_links_to_files_of_the_repository_lead_to_one_that_is_no_build_output(pages):
    urls = metadata("tritonclip").get_all("Project-URL") or []
    (url,) = re.findall("Repository, (.*)", "\n".join(urls))
    links = {link for page in pages.values() for link in page.links}
    paths = {
        match[1]
        for link in links
        if (match := re.match(rf"{re.escape(url)}/(?:blob|edit|tree|raw)/main/([^?#]*)", link))
    }
    assert "docs/index.md" in paths
    assert not {
        path for path in paths if not (ROOT / path).exists() or path.startswith("docs/api/")
    }


def test_each_public_name_has_a_page_that_links_to_its_source(pages):
    reference = {path.stem: page for path, page in pages.items() if path.parent == SITE / "api"}
    assert {f"tritonclip.{n}" for n in tritonclip.__all__ if n != "functional"} <= set(reference)
    for name, page in reference.items():
        source = rf"\.\./_modules/.*#(.*\.)?{name.rpartition('.')[2]}"
        assert any(re.fullmatch(source, link) for link in page.links), name


def test_icons_at_the_top_of_a_phone_keep_their_distance(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{address}/index.html")
    theme, contents = (
        page.locator(f".header-right {icon} svg:visible").bounding_box()
        for icon in (".theme-toggle", ".toc-header-icon")
    )
    assert contents["x"] - (theme["x"] + theme["width"]) >= 12
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_pages_load_without_errors_and_fit_their_column(browser, address, width, scheme):
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    page = browser.new_page(viewport=size, color_scheme=scheme)
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    # A request of the last page may be cut off by the next one.
    page.on(
        "requestfailed",
        lambda r: faults.append(r.url) if r.failure != "net::ERR_ABORTED" else None,
    )
    folder = os.environ.get("TRITONCLIP_SCREENSHOTS")

    found = {}
    for name in _pages():
        page.goto(f"{address}/{name}")
        height = page.evaluate("document.documentElement.scrollHeight")
        if name.startswith("performance/") and height > LONGEST:
            faults.append(f"{height} pixels high before a table is unfolded")
        if folder and not name.startswith("api/"):
            path = f"{folder}/{name.replace('/', '-')}-{width}-{scheme}.png"
            page.screenshot(path=path, full_page=True)
        faults += page.evaluate(OVERFLOWS)
        if faults:
            found[name] = list(faults)
            faults.clear()
    page.close()

    assert not found


def test_figures_have_the_colours_of_the_scheme_that_a_reader_chose(browser, address):
    """The button of the theme, where the system has the other scheme."""
    page = browser.new_page(color_scheme="light")
    page.goto(f"{address}/performance/gpu.html")
    figure = page.locator("article img").first
    light = figure.screenshot()
    page.evaluate("document.body.dataset.theme = 'dark'")
    dark = figure.screenshot()
    page.emulate_media(color_scheme="dark")
    page.evaluate("document.body.dataset.theme = 'auto'")

    assert dark != light
    assert dark == figure.screenshot()
    page.close()


def test_previews_of_a_link_have_a_title_a_text_and_a_picture_of_the_site(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    tags = {
        name: page.locator(f"meta[property='og:{name}']").get_attribute("content")
        for name in ("title", "description", "url", "image")
    }

    assert all(tags.values())
    picture = tags["image"].removeprefix(tags["url"].removesuffix("index.html"))
    assert (SITE / picture).exists()
    page.close()


# Contrast as WCAG 2 has it: AA asks for 4.5 of text.
CONTRAST = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number)
    const light = colour => numbers(colour).slice(0, 3).map(c => c / 255)
        .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
    const ratios = []
    for (const block of document.querySelectorAll('.highlight pre')) {
        const back = light(getComputedStyle(block.closest('.highlight')).backgroundColor)
        for (const word of [block, ...block.querySelectorAll('span')]) {
            const text = light(getComputedStyle(word).color)
            ratios.push((Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05))
        }
    }
    return Math.min(...ratios)
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_is_readable(browser, address, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.goto(f"{address}/recipes.html")

    assert page.evaluate(CONTRAST) >= 4.5
    page.close()


@pytest.mark.parametrize(
    ("word", "title"),
    [
        ("clip_grad_norm_", "clip_grad_norm_"),
        ("FSDP2", "Distributed training"),
        ("NaN", "The optimizer wrapper"),
    ],
)
def test_search_finds(browser, address, word, title):
    page = browser.new_page()
    page.goto(f"{address}/search.html?q={word}")
    page.wait_for_selector("#search-results .search li a")

    assert title in page.locator("#search-results .search li > a").all_inner_texts()
    page.close()
