"""The page in a real browser: items to begin with, upload, search, click-through, scrolling, filters, errors, keyboard, phone."""

import shutil
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from gpq_faiss.serve.guard import Settings
from PIL import Image
from served import TOKEN, listening, open_live

from gpq_faiss.data.standard import open_digits
from gpq_faiss.serve.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

DIGITS = open_digits()


def until(page, expression):
    """Wait until a JavaScript expression holds; ``wait_for_function`` would evaluate it in the page, which its policy forbids."""
    end = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def serving(encoder, made, **options):
    """The service in a thread."""
    service = Service(encoder, open_live(made / "index.faiss"), DIGITS)
    with listening(service, Settings(rate=0, **options)) as (address, port):
        yield SimpleNamespace(address=f"http://{address}:{port}", service=service)


@pytest.fixture(scope="module")
def site(encoder, made):
    with serving(encoder, made, max_upload=20_000, max_k=120) as site:
        yield site


class Tab:
    """A page, and what the browser complained of."""

    def __init__(self, browser, site, **options):
        # Narrow and low enough that the first results reach beyond its end.
        options.setdefault("viewport", {"width": 800, "height": 500})
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(15_000)
        self.complaints = []
        self.requests = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = site.address
        self.page.goto(site.address)

    def ready(self):
        self.page.wait_for_selector("body[data-ready]")
        return self

    def results(self, first=None):
        if first is not None:
            self.page.wait_for_selector(f"#results li:first-child button[data-id='{first}']")
        self.page.wait_for_selector("body:not(.busy)")
        return [
            int(one.get_attribute("data-id"))
            for one in self.page.query_selector_all("#results button")
        ]

    def shows(self, wanted):
        assert self.results(wanted[0]) == wanted

    def error(self, text):
        self.page.wait_for_selector(f"#error:visible:has-text('{text}')")


@pytest.fixture
def tab(browser, site):
    opened = Tab(browser, site).ready()
    yield opened
    # Favicons and pictures, too, come from the service.
    assert all(url.startswith((site.address, "blob:")) for url in opened.requests)
    opened.page.context.close()


def digit(row, path):
    Image.fromarray(DIGITS.pixels[row]).save(path)
    return path


def nearest(site, row, k, **options):
    vector, _ = site.service.encoder.embed(DIGITS.read(slice(row, row + 1)), queries=True)
    found = site.service.live.snapshot.index.search(vector, k, **options)[1][0]
    return [int(i) for i in found]


def test_an_uploaded_image_is_searched_by_and_a_click_goes_on(tab, site, tmp_path):
    page = tab.page
    page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    wanted = nearest(site, 7, 24)
    tab.shows(wanted)
    assert page.inner_text("#status").startswith("24 results, ")
    assert page.inner_text("#status").endswith("of 1,797 items")
    assert page.inner_text("#asked-text") == "seven.png"
    until(
        page,
        "[...document.querySelectorAll('#results img')].slice(0, 6).every((i) => i.naturalWidth === 8)",
    )
    # A score is shown as a part of the best possible one.
    Z = site.service.encoder.model.codebooks
    vector, _ = site.service.encoder.embed(DIGITS.read(slice(7, 8)), queries=True)
    best = sum(
        float((z @ part).max()) for z, part in zip(Z, vector.reshape(len(Z), -1), strict=True)
    )
    scores = site.service.live.snapshot.search(vector, 24)[0][0]
    for n in (0, 23):
        button = page.query_selector_all("#results button")[n]
        part = 100 * float(scores[n]) / best
        shown = float(button.query_selector(".score").inner_text().removesuffix(" %"))
        assert part - 0.11 < shown <= part + 0.01
        assert float(button.query_selector("meter").get_attribute("value")) == shown
        assert button.get_attribute("title") == f"score {scores[n]:.3f}, best possible {best:.3f}"
        assert f", {shown} % of the best possible score: search by it" in button.get_attribute(
            "aria-label"
        )
    assert "best that any code could have for this query" in page.inner_text("#scale")
    other = wanted[5]
    page.click(f"#results button[data-id='{other}']")
    after = nearest(site, other, 24)
    until(page, f"document.querySelector('#asked-text').textContent === 'item {other}'")
    tab.shows(after)
    assert page.url.endswith(f"#{other}")
    third = next(i for i in after if i not in (other, wanted[0]))
    page.click(f"#results button[data-id='{third}']")
    tab.shows(nearest(site, third, 24))
    page.go_back()
    tab.shows(after)
    page.go_back()
    page.wait_for_selector("#asked-text:text-is('seven.png')")
    tab.shows(wanted)
    assert tab.complaints == []


def test_it_opens_with_items_of_every_label_which_filter_too(tab, site):
    page = tab.page
    classes = DIGITS.labels.class_ids()
    page.wait_for_selector("#results li")
    began = tab.results()
    assert classes[began].tolist() == [n % 10 for n in range(24)]
    assert page.inner_text("#status") == "24 of 1,797 items: choose one to search by it"
    assert page.is_hidden("#asked")
    page.reload()
    page.wait_for_selector("#results li")
    assert tab.results() == began
    page.check("#labels input[value='4']")
    until(
        page,
        "[...document.querySelectorAll('#results .labels')].every((one) => one.textContent === '4')",
    )
    assert set(classes[tab.results()]) == {4}
    page.uncheck("#labels input[value='4']")
    tab.results(began[0])
    chosen = began[12]
    page.click(f"#results button[data-id='{chosen}']")
    wanted = nearest(site, chosen, 24)
    tab.shows(wanted)
    page.wait_for_selector(f"#asked-labels:text-is('{classes[chosen]}')")
    assert page.inner_text("#asked-text") == f"item {chosen}"
    assert page.get_attribute("#asked-image", "alt") == f"Query: item {chosen}"
    assert page.evaluate("document.activeElement.id") == "asked"
    page.go_back()
    tab.shows(began)
    assert page.is_hidden("#asked")
    page.go_forward()
    tab.shows(wanted)
    page.check("#labels input[value='8']")
    eights = nearest(site, chosen, 24, where=lambda ids: classes[ids] == 8)
    tab.shows(eights)
    page.fill("#deny", f"{eights[0]}, {eights[1]}")
    page.press("#deny", "Enter")
    tab.shows(
        nearest(site, chosen, 24, where=lambda ids: (classes[ids] == 8) & ~np.isin(ids, eights[:2]))
    )
    page.uncheck("#labels input[value='8']")
    page.click("text=All items")
    tab.shows(began)
    assert page.url == f"{site.address}/"
    assert tab.complaints == []


def test_scrolling_shows_more_and_what_is_there_stays(tab, site):
    page = tab.page
    page.wait_for_selector("#results li")
    began = tab.results()
    page.evaluate("document.querySelector('#results li').dataset.kept = 'yes'")
    page.mouse.wheel(0, 10_000)
    until(page, "document.querySelectorAll('#results li').length >= 48")
    assert tab.results()[:24] == began
    assert page.query_selector("#results li:first-child[data-kept]")
    page.fill("#id", "12")
    page.press("#id", "Enter")
    wanted = nearest(site, 12, 120)
    assert tab.results(wanted[0]) == wanted[:24]
    page.route("**/search", lambda route: route.abort())
    page.press("#more", "Enter")
    page.wait_for_selector("#error:visible:has-text('does not answer')")
    assert tab.results() == wanted[:24]
    tab.complaints.clear()  # of the request that was aborted
    page.unroute("**/search")
    page.press("#more", "Enter")  # by the keyboard
    until(page, "document.querySelectorAll('#results li').length >= 48")
    for _ in range(20):
        page.mouse.wheel(0, 100_000)
        tab.results()
        if page.is_hidden("#more"):
            break
    assert tab.results() == wanted
    assert page.inner_text("#status").startswith("120 results, ")
    assert tab.complaints == []


def test_a_dropped_and_a_pasted_image(tab, site, tmp_path):
    for event, property_, row in (("drop", "dataTransfer", 11), ("paste", "clipboardData", 30)):
        data = list(digit(row, tmp_path / "one.png").read_bytes())
        tab.page.evaluate(
            """([event, property, data]) => {
                const transfer = new DataTransfer();
                transfer.items.add(new File([new Uint8Array(data)], "one.png", { type: "image/png" }));
                const made = new Event(event, { bubbles: true, cancelable: true });
                Object.defineProperty(made, property, { value: transfer });
                document.body.dispatchEvent(made);
            }""",
            [event, property_, data],
        )
        wanted = nearest(site, row, 24)
        tab.shows(wanted)


def test_mistakes_are_said(tab, tmp_path):
    page, error = tab.page, tab.error
    page.click("#query button[type=submit]")
    error("Choose an image, or give an item")
    (tmp_path / "text.png").write_text("no image")
    page.set_input_files("#file", tmp_path / "text.png")
    error("not an image")
    assert tab.results() == []
    large = tmp_path / "large.png"
    large.write_bytes(b"\0" * 20_001)
    page.set_input_files("#file", large)
    error("more than 20,000 bytes")
    page.fill("#id", "99999")
    page.press("#id", "Enter")
    error("no item has the id 99999")
    page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    page.wait_for_selector("#results li")
    assert page.is_hidden("#error")
    page.route("**/search", lambda route: route.abort())
    page.fill("#deny", "3")
    page.press("#deny", "Enter")
    error("does not answer")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser, site, tmp_path, scheme):
    phone = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    tab = Tab(browser, site, **phone, color_scheme=scheme).ready()
    page = tab.page
    page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
    page.wait_for_selector("#results li")
    assert page.evaluate("document.documentElement.scrollWidth <= 360")
    page.tap("#results li:nth-child(2) button")
    page.wait_for_selector("#asked-text:has-text('item')")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    darkness = sum(int(part) for part in back.removeprefix("rgb(").removesuffix(")").split(",")) / 3
    assert (darkness < 64) == (scheme == "dark")
    assert tab.complaints == []
    page.context.close()


def test_a_closed_service_asks_for_the_token(browser, encoder, made, tmp_path):
    with serving(encoder, made, host="192.0.2.1", token=TOKEN) as site:
        tab = Tab(browser, site)
        page = tab.page
        page.wait_for_selector("#sign-in:visible")
        for token in ("wrong-token-wrong-token", TOKEN):
            page.fill("#token", token)
            page.press("#token", "Enter")
            if token != TOKEN:
                tab.error("token")
        tab.ready()
        assert page.is_hidden("#sign-in")
        page.set_input_files("#file", digit(7, tmp_path / "seven.png"))
        tab.shows(nearest(site, 7, 24))
        until(page, "document.querySelector('#results img').naturalWidth === 8")
        page.context.close()
