"""A headless Chromium: that of the system, or the one that Playwright has installed."""

import shutil

import pytest

PAGE = "<!doctype html><meta charset=utf-8><style>body{{color:{text};background:{paper}}}</style><body>{body}"


@pytest.fixture(scope="session")
def chromium():
    """A running browser, or a skip that says what is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright, the extra `browser`")
    with playwright.sync_playwright() as running:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: apt-get install chromium, or playwright install chromium ({error})")
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """An empty page on which an error of a script fails the test."""
    page, errors = chromium.new_page(viewport={"width": 1000, "height": 700}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def show(page):
    """Put HTML on the page, light or dark, as a notebook does: into an element, so that no script element runs."""

    def show(*parts, dark=False):
        colours = {"text": "#ddd", "paper": "#111"} if dark else {"text": "#111", "paper": "#fff"}
        page.set_content(PAGE.format(body="<main></main>", **colours))
        page.evaluate("html => { document.querySelector('main').innerHTML = html }", "".join(parts))
        return page

    return show
