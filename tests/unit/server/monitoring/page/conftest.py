"""A real Chromium for all tests of the page; without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect

from tests.brokers import PATIENCE
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.gallery import CHROMIUM, launched, visit
from tests.unit.server.monitoring.windows import watching

expect.set_options(timeout=1000 * PATIENCE)

WINDOW: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; `apt-get install chromium` brings one")
    with launched() as browser:
        yield browser


class Tab:
    """A tab of the browser, and the errors of the pages that were in it."""

    def __init__(self, browser: Browser) -> None:
        self.faults: list[str] = []
        self.page = browser.new_page(viewport=WINDOW)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error" and "net::ERR_" not in message.text:  # some tests end the connection themselves
            self.faults.append(message.text)


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Tab]:
    """One tab for all tests: another for each would be another process of the browser."""
    tab = Tab(browser)
    yield tab
    tab.page.close()


@pytest.fixture
def page(tab: Tab) -> Iterator[Page]:
    yield tab.page
    tab.page.goto("about:blank")
    tab.page.set_viewport_size(WINDOW)
    assert tab.faults == []


@pytest.fixture(scope="package")
def blank(browser: Browser) -> Iterator[Page]:
    """The page without pools, of which only the functions are used."""
    tab = Tab(browser)
    with watching(scenes.view(1, 0)) as pane:
        visit(tab.page, pane.url)
        yield tab.page
    tab.page.close()
    assert tab.faults == []
