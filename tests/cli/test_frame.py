"""Pictures of a broker on terminals of several sizes."""

from __future__ import annotations

import msgspec
import pytest

from cubroker.cli.frame import ASCII, PLAIN, Frame, of, ranges, since, some_of
from cubroker.protocol.messages import View
from tests.server.sight import scenes
from tests.server.sight.scenes import GIB


def lines(view: View, width: int = 80, height: int | None = None, own: int = 0) -> list[str]:
    return [line.plain.rstrip() for line in Frame(width, height, PLAIN, own).lines(view, scenes.NOW)]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 5), (2, 500), (8, 5), (9, 5), (16, 500)])
def test_a_picture_is_as_wide_as_the_terminal_and_no_wider(width: int, devices: int, pools: int) -> None:
    drawn = lines(scenes.view(devices, pools), width)
    assert max(map(len, drawn)) <= width
    assert len([line for line in drawn if "[" in line and "]" in line]) == (
        devices if devices <= 8 else -(-devices // 2)
    )


def test_sixteen_devices_and_five_hundred_pools_fit_a_screen() -> None:
    view = scenes.view(16, 500)
    drawn = lines(view, 80, 24)
    assert len(drawn) <= 24
    for index in range(16):
        assert any(line.startswith(f"{index:>2} [") or f"  {index:>2} [" in line for line in drawn)
    assert drawn[-1] == f"… and {500 - len([line for line in drawn if '@' in line]):,} more"
    assert lines(view)[-1] != drawn[-1]
    assert len([line for line in lines(view) if "@" in line]) == 500


def test_a_picture_says_everything_in_one_line_each() -> None:
    view = scenes.view(1, 5)
    drawn = lines(view)
    assert drawn[0] == "1 device, 54.6 of 126.0 GiB, 5 versions, 10 sessions (1 detached), 2 waiting"
    assert drawn[2] == " 0 NVIDIA H200      [███████████████~                    ····] 54.6 of 126.0 GiB"
    assert drawn[3] == "   █ current  ~ freeing  · outside the budget"
    assert drawn[6] == "create mixtral-8x22b: for room, 88.0 GiB, 5 min, process 40000 (root)"
    assert drawn[9].split() == ["POOL", "STATE", "SIZE", "ON", "LEASES", "HELD", "BY"]
    largest = max(view.pools, key=lambda pool: pool.nbytes)
    assert drawn[10].split()[:2] == [f"{largest.name}@{largest.version}", "current"]


def test_whoever_looks_is_not_counted() -> None:
    view = scenes.view(1, 5)
    assert "9 sessions" in lines(view, own=view.clients[0].session)[0]


def test_pools_that_only_processes_of_others_hold_are_told_from_those_that_nobody_holds() -> None:
    view = msgspec.structs.replace(scenes.view(1, 5), clients=())
    held = {f"{pool.name}@{pool.version}": pool.leases for pool in view.pools}
    said = {line.split()[0]: line for line in lines(view) if "@" in line}
    assert said.keys() == held.keys()
    assert all(line.endswith("other users" if held[name] else "nobody") for name, line in said.items())


def test_nothing_is_said_in_a_sentence() -> None:
    assert lines(scenes.view(1, 0))[-1] == "No pools: nothing has been loaded yet, or everything is retired."


def test_whatever_is_there_has_a_part_of_the_bar_however_small() -> None:
    frame = Frame(80, None, PLAIN, 0)
    device = scenes.view(1, 0).devices[0]
    states = {"current": 1, "draft": 1, "superseded": 1, "retired": 1, "freeing": 1}
    bar = "".join(part for part, _ in frame._bar(device, states, 40))
    assert bar.startswith("█▒▓░~ ")
    assert len(bar) == 40
    full = "".join(part for part, _ in frame._bar(device, {"current": 140 * GIB, "draft": 1}, 40))
    assert len(full) == 40


def test_terminals_without_these_characters_have_others() -> None:
    drawn = Frame(80, None, ASCII, 0).lines(scenes.view(8, 5), scenes.NOW)
    assert all(line.plain.isascii() for line in drawn[2:11])


@pytest.mark.parametrize(("numbers", "words"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 5], "0-3,5"), ([0, 2, 4], "0,2,4")])
def test_runs_of_devices_are_ranges(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (12.4, "12 s"), (300, "5 min"), (3 * 3600, "3 h"), (200_000, "2 d")]
)
def test_times_are_told_roughly(seconds: float, words: str) -> None:
    assert since(seconds) == words


def test_parts_are_told_in_the_unit_of_the_whole() -> None:
    assert of(54 * GIB, 126 * GIB) == "54.0 of 126.0 GiB"
    assert of(512, 126 * GIB) == "512 B of 126.0 GiB"


@pytest.mark.parametrize(
    ("width", "words"), [(20, "40000, 40013, 40026"), (16, "40000, 40013 +1"), (9, "40000 +2"), (5, "4000…"), (0, "…")]
)
def test_as_many_holders_are_named_as_fit(width: int, words: str) -> None:
    assert some_of(["40000", "40013", "40026"], width) == words
