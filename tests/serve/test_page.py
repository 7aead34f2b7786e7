"""The page in a real browser: upload, search, scrolling, filters, errors, phone."""

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
CLASSES = DIGITS.labels.class_ids()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serving(encoder, built, **settings):
    with open_live(built / "index.faiss") as live:
        service = Service(encoder, live, DIGITS, Settings(**settings))
        with listening(service) as address:
            yield SimpleNamespace(address=address, service=service)


@pytest.fixture(scope="module")
def site(encoder, built):
    with serving(encoder, built, max_upload=20_000, max_k=60) as site:
        yield site


class Tab:
    """A page, and what the browser complained of."""

    def __init__(self, browser, site, **options):
        # Narrow and low enough that the first results reach beyond its end.
        options.setdefault("viewport", {"width": 800, "height": 500})
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(15_000)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(site.address)

    def results(self, first=None):
        """Return the ids that are shown, once the first of them is."""
        selector = "#results li:first-child button" + (
            f"[data-id='{first}']" if first is not None else ""
        )
        self.page.wait_for_selector(selector)
        self.page.wait_for_selector("body:not(.busy)")
        return [
            int(button.get_attribute("data-id"))
            for button in self.page.query_selector_all("#results button")
        ]

    def shows(self, ids):
        assert self.results(ids[0]) == ids

    def error(self, text):
        self.page.wait_for_selector(f"#error:visible:has-text('{text}')")

    def search(self, text):
        self.page.fill("#id", text)
        self.page.press("#id", "Enter")


@pytest.fixture
def tab(browser, site):
    tab = Tab(browser, site)
    tab.page.wait_for_selector("body[data-ready]")
    yield tab
    assert all(url.startswith((site.address, "blob:")) for url in tab.requests)
    tab.page.context.close()


def digit(row, path):
    Image.fromarray(DIGITS.pixels[row]).save(path)
    return path


def nearest(site, row, k=24, **filters):
    vector, _ = site.service.encoder.embed(DIGITS.read(slice(row, row + 1)), queries=True)
    return site.service.live.index.search(vector, k, **filters)[1][0].tolist()


def test_an_uploaded_image_is_searched(tab, site, tmp_path):
    tab.page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    tab.shows(nearest(site, 7))
    status = tab.page.inner_text("#status")
    assert status.startswith("24 results, ")
    assert status.endswith("of 1,797 items")
    assert tab.page.inner_text("#asked-text") == "seven.png"
    tab.page.wait_for_selector("#results li:nth-child(6) img.small")
    assert tab.complaints == []


def test_bars_compare_the_scores_that_are_shown(tab, site):
    tab.search("7")
    tab.results(nearest(site, 7)[0])
    shares = [
        float(bar.get_attribute("style").removeprefix("width: ").removesuffix("%;"))
        for bar in tab.page.query_selector_all("#results .bar")
    ]
    assert (shares[0], shares[-1]) == (100, 0)
    assert shares == sorted(shares, reverse=True)


def test_a_click_searches_by_an_item_and_back_returns(tab, site, tmp_path):
    page = tab.page
    page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    first = nearest(site, 7)
    tab.shows(first)
    page.click(f"#results button[data-id='{first[5]}']")
    tab.shows(nearest(site, first[5]))
    assert page.url.endswith(f"#{first[5]}")
    page.wait_for_selector(f"#asked-labels:text-is('{CLASSES[first[5]]}')")
    assert page.evaluate("document.activeElement.id") == "asked"
    page.go_back()
    page.wait_for_selector("#asked-text:text-is('seven.png')")
    tab.shows(first)


def test_it_opens_with_items_of_every_label(tab):
    first = tab.results()
    assert CLASSES[first].tolist() == [n % 10 for n in range(24)]
    assert tab.page.inner_text("#status") == "24 of 1,797 items: choose one to search by it"
    assert tab.page.is_hidden("#asked")


def test_labels_and_ids_filter(tab, site):
    page = tab.page
    tab.search("12")
    tab.shows(nearest(site, 12))
    page.check("#labels input[value='8']")
    eights = nearest(site, 12, allow=np.flatnonzero(CLASSES == 8))
    tab.shows(eights)
    page.fill("#deny", f"{eights[0]}, {eights[1]}")
    page.press("#deny", "Enter")
    tab.shows(nearest(site, 12, allow=np.setdiff1d(np.flatnonzero(CLASSES == 8), eights[:2])))
    page.uncheck("#labels input[value='8']")
    page.click("text=All items")
    page.wait_for_selector("#asked", state="hidden")
    assert page.url == f"{site.address}/"


def test_scrolling_shows_more_and_keeps_the_first(tab, site):
    page = tab.page
    tab.search("12")
    expected = nearest(site, 12, 60)
    assert tab.results(expected[0]) == expected[:24]
    page.evaluate("document.querySelector('#results li').dataset.kept = 'yes'")
    while not page.is_hidden("#more"):
        page.mouse.wheel(0, 100_000)
        tab.results()
    assert tab.results() == expected
    assert page.query_selector("#results li:first-child[data-kept]")
    assert page.inner_text("#status").startswith("60 results, ")


@pytest.mark.parametrize(
    ("event", "property_"), [("drop", "dataTransfer"), ("paste", "clipboardData")]
)
def test_a_dropped_or_pasted_image_is_searched(tab, site, tmp_path, event, property_):
    tab.page.evaluate(
        """([event, property, data]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(data)], "one.png", { type: "image/png" }));
            const event_ = new Event(event, { bubbles: true, cancelable: true });
            Object.defineProperty(event_, property, { value: transfer });
            document.body.dispatchEvent(event_);
        }""",
        [event, property_, list(digit(11, tmp_path / "one.png").read_bytes())],
    )
    tab.shows(nearest(site, 11))


def test_an_error_is_said_and_keeps_the_results(tab, site, tmp_path):
    page = tab.page
    tab.search("12")
    expected = nearest(site, 12)
    tab.shows(expected)
    (tmp_path / "text.png").write_text("no image")
    page.set_input_files("#file", tmp_path / "text.png")
    tab.error("not an image")
    (tmp_path / "large.png").write_bytes(b"\0" * 20_001)
    page.set_input_files("#file", tmp_path / "large.png")
    tab.error("more than 20,000 bytes")
    for text, message in (
        ("99999", "no item has the id 99999"),
        ("none", "No item has the name none"),
    ):
        tab.search(text)
        tab.error(message)
    tab.search("12")
    page.wait_for_selector("#error", state="hidden")
    page.route("**/search", lambda route: route.abort())
    page.fill("#deny", "3")
    page.press("#deny", "Enter")
    tab.error("does not answer")
    tab.shows(expected)
    page.unroute("**/search")
    page.fill("#deny", "")
    tab.search("7")
    tab.shows(nearest(site, 7))
    assert page.is_hidden("#error")


def test_an_added_item_is_found_by_its_name_and_label(browser, encoder, index_file):
    with open_live(index_file, writable=True) as live:
        code = live.index.code_of(3).tobytes()
        live.change(None, code, "the new one", ("a new label",))
        live.change(3, None)
        live.change(3, code, "another")
        with listening(Service(encoder, live, DIGITS)) as address:
            tab = Tab(browser, SimpleNamespace(address=address))
            tab.page.check("#labels input[value='a new label']")
            tab.page.wait_for_selector("#results li:only-child button[data-id='1797'] .none")
            tab.page.uncheck("#labels input[value='a new label']")
            tab.search("another")
            tab.page.wait_for_selector("#asked-text:text-is('another')")
            tab.page.wait_for_selector("#asked-image", state="hidden")
            tab.page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser, site, tmp_path, scheme):
    phone = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    tab = Tab(browser, site, **phone, color_scheme=scheme)
    page = tab.page
    page.wait_for_selector("body[data-ready]")
    page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    tab.results(nearest(site, 7)[0])
    assert page.evaluate("document.documentElement.scrollWidth <= 360")
    page.tap("#results li:nth-child(2) button")
    page.wait_for_selector("#asked-text:has-text('item')")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [
        int(channel) for channel in background.removeprefix("rgb(").removesuffix(")").split(",")
    ]
    assert (sum(channels) < 192) == (scheme == "dark")
    assert tab.complaints == []
    page.context.close()


def test_a_closed_service_asks_for_the_token(browser, encoder, built):
    with serving(encoder, built, host="192.0.2.1", token=TOKEN) as site:
        tab = Tab(browser, site)
        page = tab.page
        page.wait_for_selector("#sign-in:visible")
        page.fill("#token", "wrong-token-wrong-token")
        page.press("#token", "Enter")
        tab.error("the token is missing or wrong")
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
        page.wait_for_selector("body[data-ready]")
        assert page.is_hidden("#sign-in")
        page.wait_for_selector("#results img.small")
        page.context.close()
