"""The page in a real browser: upload, search, scrolling, filters, errors."""

import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from model_factory import digits
from PIL import Image
from served import TOKEN, listening, open_live

from gpq_faiss.serve.schemas import Settings
from gpq_faiss.serve.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

DIGITS = digits()
CLASSES = DIGITS.labels.dense().argmax(axis=1)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serving(encoder, path, **settings):
    with open_live(path) as live:
        service = Service(encoder, live, DIGITS, Settings(**settings))
        with listening(service) as address:
            yield SimpleNamespace(address=address, service=service)


@pytest.fixture(scope="module")
def site(encoder, built):
    with serving(encoder, built / "index.faiss", max_k=60) as site:
        yield site


class Tab:
    """A page, and the addresses that it requested."""

    def __init__(self, browser, address, **options):
        # Narrow and low enough that the first results reach beyond its end.
        options.setdefault("viewport", {"width": 800, "height": 500})
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(15_000)
        self.requests = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def shows(self, ids):
        """Check that exactly these results are shown, in this order."""
        self.page.wait_for_selector(f"#results li:first-child button[data-id='{ids[0]}']")
        self.page.wait_for_selector("body:not(.busy)")
        buttons = self.page.query_selector_all("#results button")
        assert [int(button.get_attribute("data-id")) for button in buttons] == ids

    def fails(self, message):
        self.page.wait_for_selector(f"#error:visible:has-text('{message}')")

    def search(self, text):
        self.page.fill("#id", text)
        self.page.press("#id", "Enter")


@pytest.fixture
def tab(browser, site):
    tab = Tab(browser, site.address)
    tab.page.wait_for_selector("body[data-ready]")
    yield tab
    assert all(url.startswith((site.address, "blob:")) for url in tab.requests)
    tab.page.context.close()


@pytest.fixture
def seven(tmp_path):
    Image.fromarray(DIGITS.image(7)).save(tmp_path / "seven.png")
    return tmp_path / "seven.png"


def nearest(site, row, k=24, **filters):
    vector, _ = site.service.encoder.embed(DIGITS.read(slice(row, row + 1)), queries=True)
    return site.service.live.index.search(vector, k, **filters)[1][0].tolist()


def test_an_uploaded_image_is_searched(tab, site, seven):
    tab.page.set_input_files("#file", seven)
    tab.shows(nearest(site, 7))
    assert tab.page.inner_text("#status").startswith("24 results, ")
    assert tab.page.inner_text("#asked-text") == "seven.png"
    tab.page.wait_for_selector("#results li:nth-child(6) img.small")


def test_bars_go_from_the_worst_to_the_best_result(tab, site):
    tab.search("7")
    tab.shows(nearest(site, 7))
    styles = tab.page.eval_on_selector_all(".bar", "all => all.map(bar => bar.style.width)")
    scores = tab.page.eval_on_selector_all(".score", "all => all.map(score => score.innerText)")
    widths = [float(style.removesuffix("%")) for style in styles]
    assert widths == sorted(widths, reverse=True)
    assert (widths[0], widths[-1]) == (100, 0)
    legend = f"the worst result shown (score {scores[-1]}) to the best ({scores[0]})"
    assert legend in tab.page.inner_text("#scale")


def test_a_click_searches_by_an_item_and_back_returns(tab, site, seven):
    first = nearest(site, 7)
    tab.page.set_input_files("#file", seven)
    tab.shows(first)
    tab.page.click(f"#results button[data-id='{first[5]}']")
    tab.shows(nearest(site, first[5]))
    tab.page.wait_for_selector(f"#asked-labels:text-is('{CLASSES[first[5]]}')")
    tab.page.go_back()
    tab.page.wait_for_selector("#asked-text:text-is('seven.png')")
    tab.shows(first)


def test_labels_and_ids_filter(tab, site):
    eights = np.flatnonzero(CLASSES == 8)
    best = nearest(site, 12, allow=eights)[0]
    tab.search("12")
    tab.page.fill("#deny", str(best))
    tab.page.check("#labels input[value='8']")
    tab.shows(nearest(site, 12, allow=eights[eights != best]))


def test_scrolling_shows_more_and_keeps_the_first(tab, site):
    tab.search("12")
    tab.shows(nearest(site, 12))
    tab.page.evaluate("document.querySelector('#results li').dataset.kept = 'yes'")
    while not tab.page.is_hidden("#more"):
        tab.page.mouse.wheel(0, 100_000)
        tab.page.wait_for_selector("body:not(.busy)")
    tab.shows(nearest(site, 12, 60))
    assert tab.page.query_selector("#results li:first-child[data-kept]")


def test_errors_keep_the_results(tab, site, tmp_path):
    expected = nearest(site, 12)
    tab.search("12")
    tab.shows(expected)
    (tmp_path / "text.png").write_text("no image")
    tab.page.set_input_files("#file", tmp_path / "text.png")
    tab.fails("not an image")
    tab.search("none")
    tab.fails("No item has the name none")
    tab.page.route("**/search", lambda route: route.abort())
    tab.search("7")
    tab.fails("does not answer")
    tab.shows(expected)
    tab.page.unroute("**/search")
    tab.search("9")
    tab.shows(nearest(site, 9))
    assert tab.page.is_hidden("#error")


def test_an_added_item_has_its_own_label_and_no_picture(browser, encoder, index_file):
    with open_live(index_file, writable=True) as live:
        live.change(None, live.index.code_of(3).tobytes(), "the new one", ("a new label",))
        with listening(Service(encoder, live, DIGITS)) as address:
            page = Tab(browser, address).page
            page.check("#labels input[value='a new label']")
            page.wait_for_selector("#results li:only-child button[data-id='1797'] .none")
            page.context.close()


def test_a_closed_service_asks_for_the_token(browser, encoder, built):
    with serving(encoder, built / "index.faiss", host="192.0.2.1", token=TOKEN) as site:
        page = Tab(browser, site.address).page
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
        page.wait_for_selector("#results img.small")
        assert page.is_hidden("#sign-in")
        page.context.close()
