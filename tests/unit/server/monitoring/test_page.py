"""The page, in a real Chromium: what it shows, what a click tells, and what it makes of names that mean harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cubroker.protocol.messages import View
from tests.brokers import PATIENCE
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.windows import Pane, watching

expect.set_options(timeout=1000 * PATIENCE)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; `apt-get install chromium` brings one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own; it is shown nothing but what these tests serve.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert [fault for fault in faults if "net::ERR_" not in fault] == []  # some tests end the connection themselves


def visit(page: Page, pane: Pane) -> None:
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(pane.url)
    expect(page.locator("#pulse")).to_have_text("live")


@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 500), (8, 5), (16, 500)])
def test_every_device_is_a_map_and_every_block_is_in_it(page: Page, devices: int, pools: int) -> None:
    view = scenes.view(devices, pools)
    with watching(view) as pane:
        visit(page, pane)
        expect(page.locator(".card svg")).to_have_count(devices)
        expect(page.locator(".block")).to_have_count(len(view.blocks))
        inside = """cards => cards.every(card => {
            const box = card.querySelector("svg").getBoundingClientRect();
            return [...card.querySelectorAll(".block rect")].every(rect => {
                const b = rect.getBoundingClientRect();
                return b.width > 0 && b.height > 0 && b.left >= box.left - 2 && b.right <= box.right + 2
                    && b.top >= box.top - 2 && b.bottom <= box.bottom + 2;
            });
        })"""
        assert page.locator(".card").evaluate_all(inside)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than its window"


def test_it_fits_a_narrow_window(page: Page) -> None:
    with watching(scenes.view(2, 5)) as pane:
        page.set_viewport_size({"width": 400, "height": 800})
        visit(page, pane)
        page.locator(".block").first.click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_areas_are_in_proportion_to_bytes(page: Page) -> None:
    view = scenes.view(1, 5)
    with watching(view) as pane:
        visit(page, pane)
        areas = page.locator(".block").evaluate_all(
            """blocks => blocks.map(block => {
                const rect = block.querySelector("rect");
                return [block.dataset.key, rect.getAttribute("width") * rect.getAttribute("height")];
            })"""
        )
    nbytes = {f"{block.pool}@{block.version}" if block.pool else "private": block.nbytes for block in view.blocks}
    ratios = [area / nbytes[key] for key, area in areas]
    assert max(ratios) < 1.01 * min(ratios)


def test_a_click_tells_who_holds_a_pool_wherever_it_is(page: Page) -> None:
    view = scenes.view(8, 5)
    pool = next(pool for pool in view.pools if len(pool.devices) == 2)
    key = f"{pool.name}@{pool.version}"
    with watching(view) as pane:
        visit(page, pane)
        page.locator(f'.block[data-key="{key}"]').first.click()
        chosen = page.locator("#chosen")
        expect(chosen.locator("h2").first).to_have_text(key)
        expect(page.locator(".ring")).to_have_count(2)
        holders = [c for c in view.clients if any((x.pool, x.version) == (pool.name, pool.version) for x in c.leases)]
        expect(chosen.locator("tbody tr")).to_have_count(len(holders))
        for client in holders:
            expect(chosen).to_contain_text(str(client.pid))
        page.keyboard.press("Escape")
        expect(chosen).to_be_hidden()
        page.locator("#pools tbody tr", has_text=key).click()
        expect(chosen.locator("h2").first).to_have_text(key)


def test_a_block_can_be_chosen_by_the_keyboard(page: Page) -> None:
    with watching(scenes.view(1, 5)) as pane:
        visit(page, pane)
        block = page.locator(".block").first
        block.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#chosen h2").first).to_have_text(str(block.get_attribute("data-key")))


def test_what_changes_is_shown_without_a_reload(page: Page) -> None:
    view = scenes.view(1, 5)
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane)
        expect(page.locator("#pools")).to_contain_text("nothing has been loaded yet")
        expect(page.locator("#waiting")).to_be_hidden()
        pane.view = view
        expect(page.locator(".block")).to_have_count(len(view.blocks))
        expect(page.locator("#waiting")).to_contain_text("mixtral-8x22b")
        page.locator(".block").first.click()
        key = page.locator("#chosen h2").first.text_content()
        pane.view = scenes.view(1, 0)
        expect(page.locator("#chosen")).to_contain_text("It is gone")
        assert page.locator("#chosen h2").first.text_content() == key


def test_a_connection_that_ends_is_told(page: Page) -> None:
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane)
    expect(page.locator("#pulse")).to_contain_text("no connection; as of")


def test_pools_are_found_by_name(page: Page) -> None:
    view = scenes.view(1, 500)
    with watching(view) as pane:
        visit(page, pane)
        expect(page.locator("#pools small")).to_have_text("500 versions, the 200 largest are here")
        expect(page.locator("#pools tbody tr")).to_have_count(200)
        page.locator("#filter").fill("bge-m3-17@")
        expect(page.locator("#pools tbody tr")).to_have_count(1)


EVIL = '"><img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'


def poisoned(view: View) -> View:
    """The view with every text that is not ours replaced by one that would run, if it were not only text."""
    block, pool, client, waiter, device = (
        view.blocks[0],
        view.pools[0],
        view.clients[0],
        view.waiters[0],
        view.devices[0],
    )
    replace = msgspec.structs.replace
    lease = replace(client.leases[0], pool=EVIL)
    return replace(
        view,
        devices=(replace(device, name=EVIL),),
        blocks=(replace(block, pool=EVIL, state=EVIL, device=device.uuid),),
        pools=(replace(pool, name=EVIL, version=block.version, state=EVIL, share=EVIL),),
        clients=(replace(client, state=EVIL, leases=(lease,)),),
        waiters=(replace(waiter, pool=EVIL, awaits=EVIL, what=EVIL),),
    )


def test_names_that_mean_harm_are_text(page: Page) -> None:
    with watching(poisoned(scenes.view(1, 5))) as pane:
        visit(page, pane)
        page.locator(".block").first.click()
        expect(page.locator("#chosen h2").first).to_contain_text('"><img src=x')
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert page.evaluate("window.hurt") is None


def test_the_page_runs_nothing_that_was_not_in_it(browser: Browser) -> None:
    with watching(scenes.view(1, 0)) as pane:
        page = browser.new_page()
        visit(page, pane)
        with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            page.evaluate(
                "const s = document.createElement('script'); s.textContent = 'window.hurt=1'; document.body.append(s)"
            )
        assert page.evaluate("window.hurt") is None
        page.close()
