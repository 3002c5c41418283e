"""The page, in a real Chromium: what it shows, what a click tells, and what it makes of names that mean harm."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from cubroker.protocol.messages import View
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.gallery import visit
from tests.unit.server.monitoring.windows import watching


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 500), (8, 5), (16, 500)])
def test_every_device_is_a_map_and_every_block_is_in_it(page: Page, devices: int, pools: int) -> None:
    view = scenes.view(devices, pools)
    with watching(view) as pane:
        visit(page, pane.url)
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


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 200), (2, 5), (16, 200)])
def test_it_fits_a_narrow_window(page: Page, devices: int, pools: int) -> None:
    with watching(scenes.view(devices, pools)) as pane:
        page.set_viewport_size({"width": 400, "height": 800})
        visit(page, pane.url)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if pools:
            page.locator(".block").first.click()
            page.locator("#plan summary").dispatch_event("click")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


CUT = """() => [...document.querySelectorAll(".scroll, #chosen, pre")]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.parentNode.id || each.id)"""


def test_no_column_of_a_table_is_cut(page: Page) -> None:
    view = scenes.view(8, 200)
    with watching(view) as pane:
        visit(page, pane.url)
        page.locator("#plan summary").dispatch_event("click")
        row = page.locator("#pools tbody tr", has_text="vllm").first
        row.dispatch_event("click")
        expect(page.locator("#chosen tbody tr").first).to_be_attached()
        for width in (1280, 1060, 950, 700, 400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(CUT) == [], width
            for title in ("State", "Size", "Held by", "Age"):
                expect(row.locator(f'td[data-title="{title}"]')).to_be_visible()
            told = row.locator('td[data-title="Held by"]').evaluate(
                "cell => getComputedStyle(cell, '::before').content"
            )
            beside = "data-title" in told or "Held by" in told
            assert beside == (width <= 900), f"each figure has its title beside it at {width} pixels"


def test_tables_are_sorted_by_the_column_that_is_clicked(page: Page) -> None:
    view = scenes.view(8, 200)
    pools = {f"{pool.name}@{pool.version}": pool for pool in view.pools}
    names = page.locator("#pools tbody button")
    with watching(view) as pane:
        visit(page, pane.url)
        heading = page.locator("#pools th", has_text="Leases")
        heading.get_by_role("button").click()
        expect(heading).to_have_attribute("aria-sort", "descending")
        leases = [pools[name].leases for name in names.all_text_contents()]
        assert leases == sorted(leases, reverse=True)
        heading.get_by_role("button").click()
        expect(heading).to_have_attribute("aria-sort", "ascending")
        assert [pools[name].leases for name in names.all_text_contents()] == sorted(leases)
        page.locator("#pools th", has_text="State").get_by_role("button").click()
        states = [pools[name].state for name in names.all_text_contents()]
        assert states == sorted(states)
        page.get_by_label("oldest").check()
        expect(page.locator("#pools th[aria-sort]")).to_have_count(0)
        page.locator("#sessions th", has_text="Age").get_by_role("button").click()
        oldest = min(view.clients, key=lambda client: client.process.started if client.process else 0)
        expect(page.locator("#sessions tbody tr").first).to_contain_text(str(oldest.pid))


def test_cards_show_alike_things_at_the_same_height(page: Page) -> None:
    view = scenes.view(4, 60)
    names = ("NVIDIA H200", "NVIDIA H200 NVL with a name that is longer than a card is wide, MIG 3g.71gb") * 2
    devices = tuple(msgspec.structs.replace(each, name=name) for each, name in zip(view.devices, names, strict=True))
    with watching(msgspec.structs.replace(view, devices=devices)) as pane:
        visit(page, pane.url)
        tops = page.locator(".card svg").evaluate_all("maps => maps.map(map => map.getBoundingClientRect().top)")
        assert len(set(tops)) == 1


def test_an_empty_map_is_as_wide_as_its_card_and_explained(page: Page) -> None:
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane.url)
        expect(page.locator("#legend")).to_have_text("freeoutside the budget")
        card, drawn = (page.locator(each).first.bounding_box() for each in (".card", ".card svg"))
        assert card is not None
        assert drawn is not None
        assert drawn["width"] > card["width"] - 40
        expect(page.locator("#sessions small")).to_have_text("no process is attached, or this page may not show it")


def test_many_devices_are_told_in_few_numbers(page: Page) -> None:
    view = scenes.view(8, 5)
    uuids = tuple(device.uuid for device in view.devices)
    one, two, *rest = view.pools
    pools = (
        msgspec.structs.replace(one, devices=(*reversed(uuids), "GPU-gone")),
        msgspec.structs.replace(two, devices=(uuids[5], uuids[0], uuids[4])),
        *rest,
    )
    with watching(msgspec.structs.replace(view, pools=pools)) as pane:
        visit(page, pane.url)
        for pool, words in ((one, "0-7, gone"), (two, "0, 4, 5")):
            row = page.locator("#pools tbody tr", has_text=f"{pool.name}@{pool.version}")
            expect(row.locator('td[data-title="Devices"]')).to_have_text(words)


def test_areas_are_in_proportion_to_bytes(page: Page) -> None:
    view = scenes.view(1, 5)
    with watching(view) as pane:
        visit(page, pane.url)
        areas = page.locator(".block").evaluate_all(
            """blocks => blocks.map(block => {
                const rect = block.querySelector("rect");
                return [block.dataset.key, rect.getAttribute("width") * rect.getAttribute("height")];
            })"""
        )
    nbytes = {key_of(block): block.nbytes for block in view.blocks}
    ratios = [area / nbytes[key] for key, area in areas]
    assert max(ratios) < 1.01 * min(ratios)


@pytest.mark.slow
def test_a_click_tells_who_holds_a_pool_wherever_it_is(page: Page) -> None:
    view = scenes.view(8, 5)
    pool = next(pool for pool in view.pools if len(pool.devices) == 2)
    key = f"{pool.name}@{pool.version}"
    with watching(view) as pane:
        visit(page, pane.url)
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


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_lies_over_what_is_told_of_a_pool(page: Page, width: int) -> None:
    with watching(scenes.view(1, 200)) as pane:
        page.set_viewport_size({"width": width, "height": 700})
        visit(page, pane.url)
        page.locator("#pools tbody tr").first.dispatch_event("click")
        expect(page.locator("#chosen")).to_be_visible()
        covered = """panel => {
            const heading = document.querySelector("#pools thead th").getBoundingClientRect();
            const top = panel.getBoundingClientRect().top;
            scrollBy(0, heading.top - top - 20);  // the headings of the table are where the panel is
            const there = document.querySelector("#pools thead th").getBoundingClientRect();
            const seen = document.elementFromPoint(there.left + 20, there.top + 5);
            return there.top > panel.getBoundingClientRect().top && !panel.contains(seen);
        }"""
        assert not page.locator("#chosen").evaluate(covered)


@pytest.mark.slow
def test_blocks_are_reached_and_chosen_by_the_keyboard(page: Page) -> None:
    view = scenes.view(1, 5)
    keys = [key_of(block) for block in sorted(view.blocks, key=lambda block: -block.nbytes)]
    focused = "document.activeElement.dataset.key"
    with watching(view) as pane:
        visit(page, pane.url)
        page.locator(".card .block").first.focus()
        for key, expected in (("End", keys[-1]), ("Home", keys[0]), ("ArrowRight", keys[1]), ("ArrowLeft", keys[0])):
            page.keyboard.press(key)
            assert page.evaluate(focused) == expected
        assert page.locator(".block[tabindex='0']").count() == 1, "one stop of the Tab key for each map"
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#chosen h2").first).to_have_text(keys[1])
        pane.view = msgspec.structs.replace(view, waiters=())
        expect(page.locator("#waiting")).to_be_hidden()
        assert page.evaluate(focused) == keys[1], "a new picture does not take the focus"


def key_of(block: Any) -> str:
    name = getattr(block, "pool", None) or getattr(block, "name", "")
    return f"{name}@{block.version}" if name else "private"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_a_label_is_a_whole_name_or_the_number_of_one_beside_the_map(page: Page, width: int) -> None:
    view = scenes.view(1, 200)
    with watching(view) as pane:
        page.set_viewport_size({"width": width, "height": 900})
        visit(page, pane.url)
        labels = page.locator(".block").evaluate_all(
            """blocks => blocks.map(block =>
                [block.dataset.key, [...block.querySelectorAll("text")].map(text => text.textContent)])"""
        )
        listed = page.locator("ol .name").all_text_contents()
        inside = """blocks => blocks.every(block => {
            const box = block.querySelector("rect").getBoundingClientRect();
            return [...block.querySelectorAll("text")].every(text => {
                const b = text.getBoundingClientRect();
                return b.left >= box.left - 1 && b.right <= box.right + 1 && b.bottom <= box.bottom + 2;
            });
        })"""
        assert page.locator(".block").evaluate_all(inside)
    assert len(listed) == 10
    for key, lines in labels:
        number = str(listed.index(key) + 1) if key in listed else ""
        assert "".join(lines).startswith((f"{number} {key}", number or key)) or not lines, (key, lines)
        assert lines or not number, f"{key} is number {number} of what matters, and has no label"


@pytest.mark.slow
def test_blocks_are_labelled_by_what_is_asked_for(page: Page) -> None:
    view = scenes.view(1, 200)
    pools = {f"{pool.name}@{pool.version}": pool for pool in view.pools}
    blocks = [block for block in view.blocks if block.pool]
    seen = page.locator("ol .name")
    with watching(view) as pane:
        visit(page, pane.url)
        largest = sorted((block.nbytes for block in blocks), reverse=True)[:10]
        nbytes = {key_of(block): block.nbytes for block in blocks}
        assert [nbytes[key] for key in seen.all_text_contents()] == largest
        page.get_by_label("most held").check()
        most = sorted((pools[key].leases for key in nbytes if key in pools), reverse=True)[:10]
        assert [pools[key].leases for key in seen.all_text_contents()] == most
        assert pools[str(page.locator("#pools tbody button").first.text_content())].leases == most[0]
        page.get_by_label("oldest").check()
        times = (pools[key].published for key in nbytes if key in pools)
        assert [pools[key].published for key in seen.all_text_contents()] == sorted(filter(None, times))[:10]


def test_holders_are_beside_the_map_without_a_click(page: Page) -> None:
    view = scenes.view(8, 5)
    client = next(client for client in view.clients if client.leases)
    lease = client.leases[0]
    with watching(view) as pane:
        visit(page, pane.url)
        row = page.locator("li", has_text=f"{lease.pool}@{lease.version}").first
        assert client.process is not None
        told = rf"{client.process.name} {client.pid} for \d+\sd(, [^(]+)? \(root, docker 0{{12}}\)"
        expect(row).to_contain_text(re.compile(told))
        row.hover()
        expect(page.locator(f'.block.lit[data-key="{lease.pool}@{lease.version}"]')).not_to_have_count(0)


def test_a_search_shows_on_the_map_what_it_finds(page: Page) -> None:
    view = scenes.view(1, 200)
    hit = page.locator(".block.hit")
    with watching(view) as pane:
        visit(page, pane.url)
        expect(hit).to_have_count(0)
        page.locator("#filter").fill("bge-m3")
        found = {f"{pool.name}@{pool.version}" for pool in view.pools if "bge-m3" in pool.name}
        assert set(hit.evaluate_all("blocks => blocks.map(block => block.dataset.key)")) == found
        expect(page.locator("#found")).to_contain_text(f"{len(found)} versions found")
        assert set(page.locator("ol .name").all_text_contents()) <= found
        assert float(page.locator(".block:not(.hit)").first.evaluate("b => getComputedStyle(b).opacity")) < 0.5
        client = view.clients[3]
        page.locator("#filter").fill(str(client.pid))
        held = {f"{lease.pool}@{lease.version}" for lease in client.leases}
        assert set(hit.evaluate_all("blocks => blocks.map(block => block.dataset.key)")) == held
        for pattern, like in (
            ("BGE-M3*@1", r"bge-m3.*@1"),
            ("*-1[0-4]@?", r".*-1[0-4]@."),
            ("qwen3-32b", "qwen3-32b.*"),
        ):
            page.locator("#filter").fill(pattern)
            found = {key_of(pool) for pool in view.pools if re.fullmatch(like, f"{pool.name}@{pool.version}")}
            assert found
            assert set(hit.evaluate_all("blocks => blocks.map(block => block.dataset.key)")) == found
        assert client.process is not None
        page.locator("#filter").fill(f"{client.process.name[:-1]}?")
        assert set(hit.evaluate_all("blocks => blocks.map(block => block.dataset.key)")) >= held
        page.locator("#filter").fill("[z-a]*")
        expect(page.locator("#found")).to_contain_text("0 versions found")
        page.locator("#filter").fill("no such thing")
        expect(page.locator("#found")).to_contain_text("0 versions found")


def test_names_of_devices_are_whole(page: Page) -> None:
    view = scenes.view(16, 5)
    name = "NVIDIA H200 NVL with a name that a maker made longer than any card is wide, MIG 3g.71gb"
    devices = tuple(msgspec.structs.replace(device, name=name) for device in view.devices)
    with watching(msgspec.structs.replace(view, devices=devices)) as pane:
        visit(page, pane.url)
        expect(page.locator(".card h3 span").first).to_have_text(f"0 · {name}")
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth).length"
        assert page.locator(".card, .card h3, .card p").evaluate_all(cut) == 0
        expect(page.locator(".card p").first).to_contain_text(view.devices[0].uuid)


@pytest.mark.slow
def test_what_changes_is_shown_without_a_reload(page: Page) -> None:
    view = scenes.view(1, 5)
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane.url)
        expect(page.locator("#nothing")).to_contain_text("cubroker load NAME PATH")
        for section in ("#waiting", "#plan", "#tools", "#pools"):
            expect(page.locator(section)).to_be_hidden()
        pane.view = view
        expect(page.locator(".block")).to_have_count(len(view.blocks))
        expect(page.locator("#waiting")).to_contain_text("mixtral-8x22b")
        expect(page.locator("#nothing")).to_be_hidden()
        page.locator(".block").first.click()
        key = page.locator("#chosen h2").first.text_content()
        pane.view = scenes.view(1, 0)
        expect(page.locator("#chosen")).to_contain_text("It is gone")
        assert page.locator("#chosen h2").first.text_content() == key


def test_a_stranger_is_shown_bytes_of_private_pools_and_not_that_there_are_none(page: Page) -> None:
    view = scenes.view(2, 5)
    private = tuple(block for block in view.blocks if not block.pool)
    with watching(View(view.devices, (), (), private, ())) as pane:
        visit(page, pane.url)
        expect(page.locator(".block")).to_have_count(len(private))
        for section in ("#nothing", "#plan", ".verdict >> nth=0"):
            expect(page.locator(section)).to_be_hidden()


def test_ages_go_on_while_nothing_happens(page: Page) -> None:
    view = scenes.view(1, 5)
    pools = tuple(msgspec.structs.replace(pool, published=time.time() - 600) for pool in view.pools)
    with watching(msgspec.structs.replace(view, pools=pools)) as pane:
        page.clock.install()
        visit(page, pane.url)
        expect(page.locator("#pools tbody tr").first).to_contain_text("10\u00a0min")
        page.clock.fast_forward(3600 * 1000)
        expect(page.locator("#pools tbody tr").first).to_contain_text("70\u00a0min")


@pytest.mark.slow
def test_a_new_picture_takes_neither_focus_nor_selection(page: Page) -> None:
    view = scenes.view(8, 200)
    focused = "[document.activeElement.tagName, document.activeElement.textContent]"
    with watching(view) as pane:
        visit(page, pane.url)
        buttons = (page.locator("#pools tbody button").nth(5), page.locator("li button").nth(2))
        for owner, button in enumerate(buttons, start=990_001):
            name = str(button.text_content())
            button.focus()
            pools = tuple(msgspec.structs.replace(pool, owner=owner) for pool in pane.view.pools)
            pane.view = msgspec.structs.replace(pane.view, pools=pools)
            expect(page.locator("#pools tbody tr").first).to_contain_text(str(owner))
            assert page.evaluate(focused) == ["BUTTON", name]
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#sessions tbody td'))")
        chosen = page.evaluate("String(getSelection())")
        pane.view = msgspec.structs.replace(pane.view, waiters=())
        expect(page.locator("#waiting")).to_be_hidden()
        assert page.evaluate("String(getSelection())") == chosen != ""


def test_a_connection_that_ends_is_told(page: Page) -> None:
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane.url)
    expect(page.locator("#pulse")).to_contain_text("no connection; as of")


def test_pools_are_found_by_name(page: Page) -> None:
    view = scenes.view(1, 500)
    with watching(view) as pane:
        visit(page, pane.url)
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
        visit(page, pane.url)
        page.locator(".block").first.click()
        expect(page.locator("#chosen h2").first).to_contain_text('"><img src=x')
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert page.evaluate("window.hurt") is None


def test_the_page_runs_nothing_that_was_not_in_it(browser: Browser) -> None:
    with watching(scenes.view(1, 0)) as pane:
        page = browser.new_page()
        visit(page, pane.url)
        with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            page.evaluate(
                "const s = document.createElement('script'); s.textContent = 'window.hurt=1'; document.body.append(s)"
            )
        assert page.evaluate("window.hurt") is None
        page.close()


# -- words ---------------------------------------------------------------------------------------------

CONTAINERS = json.loads((Path(__file__).parents[4] / "containers.json").read_text())
"""Paths of cgroups, and what commands name them (``tests/unit/cli/test_processes.py``)."""


def test_a_process_is_in_the_container_that_commands_name(blank: Page) -> None:
    paths = [path for path, _ in CONTAINERS]
    found = blank.evaluate("paths => paths.map(cgroup => container({process: {cgroup}}))", paths)
    assert found == ["" if name == "-" else name for _, name in CONTAINERS]
