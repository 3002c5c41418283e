"""What the page says to retire, so that so many bytes are free on a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, expect

from cubroker import Layout
from cubroker.client import Broker
from cubroker.protocol.messages import View
from cubroker.protocol.status import BlockInfo, DeviceInfo, PoolInfo, SharedBytes
from tests.brokers import PATIENCE, eventually, serving
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.gallery import visit
from tests.unit.server.monitoring.scenes import GIB, freed
from tests.unit.server.monitoring.windows import watching

PLAN = """([view, device, wanted]) => {
    const names = items => items.map(item => item.name), found = plan(view, device, wanted);
    return { ...found, candidates: names(found.candidates), held: names(found.held), chosen: names(found.chosen) };
}"""


def pool(
    name: str, version: int, state: str = "current", leases: int = 0, devices: tuple[str, ...] = ("G",)
) -> PoolInfo:
    info = scenes.pool(name, version, state, GIB, devices, 0)
    return msgspec.structs.replace(info, leases=leases)


def held(
    name: str, version: int, nbytes: int, *shared: SharedBytes, state: str = "current", stage: str = "held"
) -> BlockInfo:
    return BlockInfo("G", name, version, state, stage, nbytes * GIB, 0, shared)


def look(pools: Collection[PoolInfo], blocks: Collection[BlockInfo], budget: int = 100, promised: int = 0) -> View:
    """A view of one device, ``G``; sizes are GiB."""
    allocated = sum(block.nbytes for block in blocks)
    device = DeviceInfo(0, "G", "NVIDIA H200", 141 * GIB, budget * GIB, allocated, promised * GIB)
    return View((device,), tuple(pools), (), tuple(blocks), ())


def planned(page: Page, view: View, wanted: float, device: str = "G") -> Any:
    return page.evaluate(PLAN, [msgspec.to_builtins(msgspec.structs.asdict(view)), device, round(wanted * GIB)])


@pytest.mark.slow
def test_what_is_superseded_goes_before_what_is_current_and_what_is_held_stays(blank: Page) -> None:
    pools = [pool("a", 1, "superseded"), pool("a", 2), pool("b", 1), pool("c", 1, leases=2), pool("d", 1, "draft")]
    sizes = {("a", 1): 10, ("a", 2): 10, ("b", 1): 30, ("c", 1): 40, ("d", 1): 5}
    view = look(pools, [held(*key, nbytes) for key, nbytes in sizes.items()])
    found = planned(blank, view, 0)
    assert (found["free"], found["idle"]) == (5 * GIB, 50 * GIB)
    assert (found["candidates"], found["held"]) == (["a@1", "b@1", "a@2"], ["c@1", "d@1"])
    for wanted, chosen, frees in (
        (5, [], 0),
        (6, ["a@1"], 10),
        (15, ["a@1"], 10),
        (16, ["b@1"], 30),
        (36, ["a@1", "b@1"], 40),
    ):
        found = planned(blank, view, wanted)
        assert (found["chosen"], found["frees"], found["short"]) == (chosen, frees * GIB, 0), wanted
    found = planned(blank, view, 60)
    assert (found["chosen"], found["frees"], found["short"]) == ([], 0, 5 * GIB), "in vain, so nothing is to go"


def test_what_is_being_freed_counts_and_what_others_do_not_show_does_not(blank: Page) -> None:
    blocks = [held("a", 1, 10), held("b", 1, 20, stage="freeing"), held("", 0, 50), held("", 0, 3, stage="given up")]
    view = look([pool("a", 1)], blocks, promised=7)
    found = planned(blank, view, 33)
    assert (found["free"], found["coming"], found["chosen"]) == (10 * GIB, 23 * GIB, [])
    assert planned(blank, view, 34)["chosen"] == ["a@1"]
    assert planned(blank, view, 44)["short"] == GIB


def test_bytes_that_versions_share_are_free_with_the_last_of_them(blank: Page) -> None:
    blocks = [
        held("a", 1, 30, SharedBytes((1, 2), 20 * GIB), SharedBytes((1, 2, 3), 8 * GIB), state="superseded"),
        held("a", 2, 1, state="superseded"),
        held("a", 3, 9),
        held("b", 1, 12),
    ]
    pools = [pool("a", 1, "superseded"), pool("a", 2, "superseded"), pool("a", 3, leases=1), pool("b", 1)]
    view = look(pools, blocks, budget=52)
    found = planned(blank, view, 3)
    assert (found["idle"], found["chosen"], found["frees"]) == (35 * GIB, ["a@1", "a@2"], 23 * GIB)
    assert planned(blank, view, 2)["chosen"] == ["a@1"]
    assert planned(blank, view, 24)["chosen"] == ["a@1", "a@2", "b@1"]
    assert planned(blank, view, 36)["short"] == GIB


def test_bytes_of_which_it_is_not_told_who_has_them_are_not_promised(blank: Page) -> None:
    blocks = [held("a", 1, 30, SharedBytes((), 28 * GIB), state="superseded"), held("b", 1, 4)]
    view = look([pool("a", 1, "superseded"), pool("b", 1)], blocks, budget=34)
    found = planned(blank, view, 5)
    assert (found["idle"], found["chosen"], found["frees"]) == (6 * GIB, ["a@1", "b@1"], 6 * GIB)
    assert planned(blank, view, 7)["short"] == GIB


def test_a_device_beyond_its_budget_has_to_get_below_it_first(blank: Page) -> None:
    view = look([pool("a", 1), pool("b", 1)], [held("a", 1, 30), held("b", 1, 25)], budget=50)
    assert planned(blank, view, 25)["chosen"] == ["a@1"]
    assert planned(blank, view, 26)["chosen"] == ["a@1", "b@1"]
    assert planned(blank, view, 0)["chosen"] == ["b@1"]


def some(chance: random.Random) -> View:
    """A device with a few versions, some of which share bytes."""
    pools, blocks = [], []
    for name in "abcd"[: chance.randint(1, 4)]:
        numbers = range(1, 1 + chance.randint(1, 3))
        for number in numbers:
            state = "current" if number == numbers[-1] else "superseded"
            pools.append(pool(name, number, state, leases=chance.choice((0, 0, 0, 2))))
            others = numbers[number:]
            shared = [
                SharedBytes((number, other), chance.randint(1, 5) * GIB) for other in others if chance.random() < 0.3
            ]
            nbytes = chance.randint(0 if shared else 1, 12) + sum(each.nbytes for each in shared) // GIB
            blocks.append(held(name, number, nbytes, *shared, state=state))
    return look(pools, blocks, budget=sum(block.nbytes for block in blocks) // GIB + chance.randint(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_set_is_enough_and_none_of_it_can_be_left_out(blank: Page, seed: int) -> None:
    chance = random.Random(seed)
    view = some(chance)
    free = view.devices[0].budget - view.devices[0].allocated
    idle = {f"{pool.name}@{pool.version}": pool for pool in view.pools if not pool.leases}
    old = {name for name, pool in idle.items() if pool.state == "superseded"}
    for wanted in range(free // GIB, free // GIB + 30, 3):
        needed = wanted * GIB - free
        found = planned(blank, view, wanted)
        chosen = set(found["chosen"])
        assert chosen <= idle.keys()
        assert found["frees"] == freed(view.blocks, chosen)
        assert found["short"] == max(0, needed - freed(view.blocks, idle))
        if found["short"]:
            assert not chosen
            continue
        assert found["frees"] >= needed
        assert all(freed(view.blocks, chosen - {name}) < needed for name in chosen)
        if freed(view.blocks, old) >= needed:
            assert chosen <= old
        if not any(block.shared for block in view.blocks):
            tier = old if chosen <= old else idle.keys() - old
            others = old - tier
            least = min(
                count
                for count in range(len(tier) + 1)
                for some in itertools.combinations(tier, count)
                if freed(view.blocks, {*some, *others}) >= needed
            )
            assert len(chosen & tier) == least


def test_many_versions_are_planned_at_once(blank: Page) -> None:
    """Of thousands that nobody holds the plan looks at each a few times, and not at all of them for each."""
    names = [f"pool-{number}" for number in range(1000)]
    view = look([pool(name, 1) for name in names], [held(name, 1, 1) for name in names], budget=1000)
    half = planned(blank, view, 500)
    assert (len(half["chosen"]), half["frees"]) == (500, 500 * GIB)

    def took(view: View) -> float:
        """Milliseconds that the plan of half of a view's bytes takes, the least of some times."""
        nbytes = sum(block.nbytes for block in view.blocks)
        program = """([view, wanted]) => Math.min(...Array.from({length: 5}, () => {
            const began = performance.now();
            for (let count = 0; count < 10; count += 1) plan(view, "G", wanted);
            return performance.now() - began;
        }))"""
        time: float = blank.evaluate(program, [msgspec.to_builtins(msgspec.structs.asdict(view)), nbytes // 2])
        return time

    few = look(view.pools[:50], view.blocks[:50], budget=50)
    assert took(view) < 20 * 8 * took(few), "20 times as many take far more than 20 times as long"


@pytest.mark.parametrize(
    ("budget", "room"), [(GIB << 7, "20 GiB"), (80 * GIB, "20 GiB"), (70 * GIB, "16 GiB"), (58 << 20, "8 MiB")]
)
def test_a_size_to_begin_with_is_one_that_the_device_has(page: Page, budget: int, room: str) -> None:
    view = look([pool("a", 1)], [held("a", 1, 1)])
    device = msgspec.structs.replace(view.devices[0], budget=budget)
    with watching(msgspec.structs.replace(view, devices=(device,))) as pane:
        visit(page, pane.url)
        expect(page.locator("#room")).to_have_value(room)
        page.locator("#room").fill("")
        pane.view = view
        expect(page.locator("#answer")).to_contain_text("That is no size")


def test_holders_are_asked_for_as_much_as_is_missing(page: Page) -> None:
    names = ("a", "b", "c", "d", "e")
    pools = [pool(name, 1, leases=1) for name in names] + [pool("f", 1)]
    blocks = [held(name, 1, 10) for name in names]
    view = look(pools, [*blocks, held("f", 1, 20)], budget=70)
    with watching(view) as pane:
        visit(page, pane.url)
        for room, asked in (
            (25, "give back a@1 (10.0 GiB, by 1 lease of others)."),
            (40, "(10.0 GiB, by 1 lease of others), b@1 (10.0 GiB, by 1 lease of others)."),
            (60, "c@1 (10.0 GiB, by 1 lease of others), 1 more version."),
        ):
            page.locator("#room").fill(str(room))
            expect(page.locator("#answer")).to_contain_text(asked)
        page.locator("#room").fill("20")
        expect(page.locator("#answer")).to_contain_text("it frees 20.0 GiB here, and 20.0 GiB is free then.")
        pane.view = look(pools[:-1], blocks, budget=50)
        expect(page.locator("#answer")).to_contain_text("All of it is held, and 20.0 GiB is missing: holders have to")


def test_sizes_are_read_as_they_are_written(blank: Page) -> None:
    sizes = {"20": 20 * GIB, " 1.5 GiB": 3 << 29, "20GB": 20 * 10**9, "512m": 512 << 20, "2 TiB": 2 << 40, "7B": 7}
    assert {text: blank.evaluate("parse", text) for text in sizes} == sizes
    for text in ("", "GiB", "20 bananas", "-1", "1e9", "20 GiB!"):
        assert blank.evaluate("text => Number.isNaN(parse(text))", text), text


@pytest.mark.slow
def test_one_look_tells_for_every_device_what_to_retire_and_a_click_how(page: Page) -> None:
    view = scenes.view(8, 200)
    room = {device.uuid: device.budget - device.allocated for device in view.devices}
    with watching(view) as pane:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        visit(page, pane.url)
        fullest = min(room, key=lambda uuid: room[uuid])
        expect(page.locator("#target")).to_have_value(fullest)
        expect(page.locator(".verdict")).to_have_count(8)
        device = view.devices[3]
        data = msgspec.to_builtins(msgspec.structs.asdict(view))
        wanted = (room[device.uuid] + page.evaluate(PLAN, [data, device.uuid, 0])["idle"] // 2) >> 20
        page.locator("#room").fill(f"{wanted} MiB")
        page.locator(f'.card[data-device="{device.uuid}"] .verdict').click()
        expect(page.locator("#target")).to_have_value(device.uuid)
        found = page.evaluate(PLAN, [data, device.uuid, wanted << 20])
        assert found["chosen"], "a scene in which nothing can be retired tests nothing"
        expect(page.locator("#command")).to_have_text("\n".join(f"cubroker retire {name}" for name in found["chosen"]))
        page.locator("#copy").click()
        expect(page.locator("#copy")).to_have_text("copied")
        assert page.evaluate("navigator.clipboard.readText()") == page.locator("#command").text_content()
        for each in view.devices:
            card, plan = (
                page.locator(f'.card[data-device="{each.uuid}"]'),
                planned(page, view, wanted / 1024, each.uuid),
            )
            shaded = card.locator(".block:has(.over)").evaluate_all("blocks => blocks.map(block => block.dataset.key)")
            assert set(shaded) <= set(plan["chosen"]), "a card stripes what its own line names"
            assert shaded or not plan["chosen"]
            words = str(card.locator(".verdict").text_content())
            assert all(name in words for name in plan["chosen"][:3])
            current = {f"{pool.name}@{pool.version}" for pool in view.pools if pool.state == "current"}
            if plan["chosen"]:
                assert f"which frees {page.evaluate('size', plan['frees'])}" in words
                assert words.endswith("current") == bool(current & set(plan["chosen"]))
        assert page.locator(".card.target").get_attribute("data-device") == device.uuid
        page.locator("#more summary").click()
        assert page.locator("#more tbody tr").count() == len(found["candidates"])
        page.locator("#room").fill(f"{(found['free'] + found['idle'] + (1 << 30)) >> 20} MiB")
        expect(page.locator("#answer")).to_contain_text("1.0 GiB too little")
        first = found["held"][0]
        holders = [c.pid for c in view.clients if first in (f"{lease.pool}@{lease.version}" for lease in c.leases)]
        answer = str(page.locator("#answer").text_content())
        assert first in answer
        assert any(str(pid) in answer for pid in holders), "the answer says whom to ask"
        expect(page.locator("#command")).to_be_hidden()
        page.locator("#room").fill("1000 GiB")
        expect(page.locator("#answer")).to_contain_text("Its budget is")
        page.locator("#room").fill("much")
        expect(page.locator("#room")).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#command")).to_be_hidden()


@pytest.mark.slow
def test_a_name_that_means_harm_is_quoted(blank: Page) -> None:
    assert blank.evaluate("quoted", "deepseek/r1:q4+a_b-c.d@12") == "deepseek/r1:q4+a_b-c.d@12"
    assert blank.evaluate("quoted", "a'; rm -rf ~ #@1") == "'a'\\''; rm -rf ~ #@1'"


@contextmanager
def shown(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Broker, str]]:
    """A broker on a device of 64 MiB, which keeps a superseded version of each pool, and the address of its page."""
    token, port = folder / "token", scenes.free_port()
    token.write_text("a-token-of-tests-only")
    token.chmod(0o600)
    monkeypatch.setenv("CUBROKER_METRICS_LISTEN", f"127.0.0.1:{port}")
    monkeypatch.setenv("CUBROKER_METRICS_TOKEN_FILE", str(token))
    monkeypatch.setenv("CUBROKER_KEEP", "1")
    with serving("host:1@64MiB", budget="64MiB") as process, Broker(process.directory) as broker:
        yield broker, f"http://127.0.0.1:{port}/"


@pytest.mark.slow
def test_what_a_real_broker_has_free_afterwards_is_what_was_asked_for(
    page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with shown(monkeypatch, tmp_path) as (broker, url):
        for name, mib in (("a", 4), ("b", 12), ("a", 4), ("c", 20), ("a", 6)):
            broker.create(name, Layout.pack([("w", "U8", (mib << 20,))])).seal()
        with broker.attach("c", device=0):
            page.context.set_extra_http_headers({"Authorization": "Bearer a-token-of-tests-only"})
            page.set_default_timeout(1000 * PATIENCE)
            page.goto(url)
            page.locator("#room").fill("36 MiB")
            expect(page.locator("#command")).to_have_text("cubroker retire a@2\ncubroker retire b@1")
            for line in str(page.locator("#command").text_content()).splitlines():
                name, _, version = line.removeprefix("cubroker retire ").partition("@")
                broker.retire(name, version=int(version))
            (device,) = broker.devices()
            eventually(lambda: device.budget - broker.devices()[0].allocated >= 36 << 20, "the room that was asked for")
            expect(page.locator("#answer")).to_contain_text("There is nothing to retire")
