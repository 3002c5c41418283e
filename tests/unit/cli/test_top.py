"""``cubroker top``: once, where scripts read it, and live on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from cubroker.cli.frame import CLIENTS, POOLS, Choice, Frame
from cubroker.cli.top import seen_by, split
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.messages import View
from cubroker.protocol.status import BlockInfo, LeaseInfo, ProcessInfo
from cubroker.server.transport.unix_sockets import read_process
from tests import forkserver
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.forkserver import CLI
from tests.unit.cli import terminal
from tests.unit.cli.processes import COMMAND, environment, run
from tests.unit.server.configured import configured
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.scenes import GIB

LAYOUT = Layout.pack([("x", "U8", (5,))])


def test_once_says_what_there_is_without_colours(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        client.create(name, LAYOUT).seal()
        with client.attach(name):
            done = run("top", "--once", "--directory", directory)
            piped = run("top", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    headline, *_ = done.stdout.splitlines()
    assert headline == "2 devices, 2.0 of 115.2 MiB, 1 version, 1 session, 0 waiting"
    row = done.stdout.splitlines()[-1]
    assert row.split()[:6] == [f"{name}@1", "current", "256", "B", "0", "1"]
    process = read_process(os.getpid())
    assert process is not None
    assert re.search(rf" \d+ s {process.name} {os.getpid()}\b", row)
    assert piped.stdout.splitlines()[0] == headline


def test_once_on_a_terminal_has_colours_and_fits(directory: Path) -> None:
    with Broker(directory) as client:
        client.create("models/" + "x" * 90, LAYOUT).seal()
        status, written = terminal.run("top", "--once", "--directory", directory)
    assert status == 0
    assert "\x1b[" in written
    assert "xxxx…" in written


def test_a_terminal_that_cannot_draw_over_a_picture_is_shown_one(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        client.create(name, LAYOUT).seal()
        status, written = terminal.run("top", "--directory", directory, TERM="dumb")
    assert status == 0
    assert f"{name}@1" in written
    assert "\x1b" not in written


def test_without_a_broker_there_is_nothing_to_show(tmp_path: Path) -> None:
    for options in ([], ["--once"]):
        done = run("top", *options, "--directory", tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
    status, written = terminal.run("top", "--directory", tmp_path)
    assert status == 3
    assert "no broker serves" in written


class Screen:
    """What a command writes to a terminal of its own, as it comes."""

    def __init__(self, descriptor: int) -> None:
        self.written = b""
        self._descriptor = descriptor
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while more := os.read(self._descriptor, 1 << 16):
                self.written += more
        except OSError:  # EIO: the other side is closed
            return

    def send(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> int:
        """Whether lines are gathered, and echoed."""
        flags: int = termios.tcgetattr(self._descriptor)[3]
        return flags & (termios.ICANON | termios.ECHO)

    def close(self) -> None:
        self._thread.join()


@contextmanager
def watching(
    directory: Path, command: Sequence[str] = (*COMMAND, "top", "--every", "0.2"), **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = environment(TERM="xterm", PYTHONIOENCODING="utf-8", CUBROKER_DIR=str(directory))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = forkserver.start(command, preload=CLI, measured=False, env=env, **streams, **options)  # as in `started`
    os.close(theirs)
    screen = Screen(ours)
    with process:
        try:
            yield process, screen
        finally:
            process.kill()
            process.wait()
            screen.close()
            os.close(ours)


def test_live_it_shows_what_changes_and_ends_at_ctrl_c(broker: BrokerProcess) -> None:
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    assert b"Traceback" not in screen.written


def test_live_it_waits_for_a_broker_that_went_away(broker: BrokerProcess) -> None:
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        broker.kill()
        eventually(lambda: b"as of " in screen.written, "the end of the broker")
        broker.start()
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool of the next broker")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_live_it_waits_for_a_broker_that_refuses_it_for_a_while() -> None:
    with configured("") as broker, watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        broker.kill()
        broker.file.write_text("quota.sessions = 0")
        broker.start()
        eventually(lambda: b"sessions of a quota of 0" in screen.written, "the refusal")
        broker.reload("")
        eventually(lambda: "quota.sessions is now" in broker.log(), "the broker to let it in")
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


LEFT, ENTERED = b"\x1b[?1049l", b"\x1b[?1049h"
"""What a terminal is told to leave its alternate screen, and to show it."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_live_a_signal_ends_it_and_leaves_the_terminal_as_it_was(broker: BrokerProcess, number: signal.Signals) -> None:
    with watching(broker.directory) as (process, screen):
        before = screen.modes()
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number
        assert screen.modes() == before
        eventually(lambda: LEFT in screen.written, "the screen of before")
    assert b"Traceback" not in screen.written


@pytest.mark.slow
def test_live_it_can_be_stopped_and_goes_on_in_the_foreground(broker: BrokerProcess) -> None:
    shell = ["bash", "--noprofile", "--norc", "-i"]
    with watching(broker.directory, shell, preexec_fn=_own_terminal, start_new_session=True) as (process, screen):
        screen.send(shlex.join([*COMMAND, "top"]).encode() + b"\n")
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        reading = screen.modes()
        screen.send(b"\x1a")
        eventually(lambda: b"Stopped" in screen.written.rpartition(LEFT)[2], "the shell to have the terminal")
        assert screen.written.count(ENTERED) == 1
        screen.send(b"fg\n")
        eventually(lambda: screen.written.count(ENTERED) == 2, "its screen")
        eventually(lambda: b"nothing has been loaded" in screen.written.rpartition(ENTERED)[2], "another picture")
        assert screen.modes() == reading
        screen.send(b"q")
        eventually(lambda: screen.written.count(LEFT) == 2, "its end")
        screen.send(b"exit\n")
        assert process.wait(PATIENCE) == 0


def _own_terminal() -> None:
    """Have the terminal on standard input control this session, as those of logins do."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def lines(view: View, width: int = 80, height: int | None = None, choice: Choice | None = None) -> list[str]:
    frame = Frame(width, height, False, choice or Choice())
    return [line.plain.rstrip() for line in frame.lines(view, scenes.NOW)]


def pressed(view: View, *keys: str, height: int = 24) -> tuple[Choice, list[str]]:
    """Return what is chosen, and shown, after keys that are pressed one after the other."""
    choice = Choice()
    drawn = lines(view, height=height, choice=choice)
    for key in keys:
        assert choice.press(key, [device.index for device in view.devices])
        drawn = lines(view, height=height, choice=choice)
    return choice, drawn


def pools(drawn: list[str]) -> list[str]:
    return [line.split()[0] for line in drawn if "@" in line and ", by " not in line]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 5), (2, 500), (8, 5), (9, 5), (16, 500)])
def test_a_picture_is_as_wide_as_the_terminal_and_no_wider(width: int, devices: int, pools: int) -> None:
    drawn = lines(scenes.view(devices, pools), width)
    assert max(map(len, drawn)) <= width
    assert len([line for line in drawn if "[" in line and "]" in line]) == (
        devices if devices <= 8 or width == 40 else -(-devices // 2)
    )


def test_sixteen_devices_and_five_hundred_pools_fit_a_screen() -> None:
    view = scenes.view(16, 500)
    drawn = lines(view, 80, 24)
    assert len(drawn) <= 24
    for index in range(16):
        assert any(line.startswith(f"{index:>2} [") or f"  {index:>2} [" in line for line in drawn)
    shown = len([line for line in drawn if "@" in line])
    assert drawn[-2] == f"1-{shown} of 500 pools, by size"
    assert drawn[-1].startswith("q quit")
    assert shown > 5
    assert len([line for line in lines(view) if "@" in line]) == 500


def test_a_picture_says_everything_in_one_line_each() -> None:
    view = scenes.view(1, 5)
    drawn = lines(view)
    assert drawn[0] == "1 device, 54.6 of 126.0 GiB, 5 versions, 10 sessions (1 detached), 3 waiting"
    assert drawn[2] == " 0 NVIDIA H200 [█████████████████~                      ·····] 54.6 of 126.0 GiB"
    assert drawn[3] == "   █ current  ~ freeing  · outside the budget"
    assert drawn[6] == "create mixtral-8x22b: for room, 88.0 GiB, 5 min, vllm 40000 (root)"
    assert drawn[8].startswith("lock mixtral-8x22b: for its turn, 7 s, python3 40026 (")
    assert drawn[10].split() == ["POOL", "STATE", "SIZE", "ON", "LEASES", "HELD", "BY"]
    largest = max(view.pools, key=lambda pool: pool.nbytes)
    assert drawn[11].split()[:2] == [f"{largest.name}@{largest.version}", "current"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("height", [15, 24])
def test_nothing_is_cut_where_it_can_go_whole(width: int, height: int) -> None:
    view = scenes.view(8, 240)
    choice = Choice()
    drawn = lines(view, width, height, choice=choice)
    assert len(drawn) == height, "the keys are at the foot of the screen, however few pools there are"
    assert len(lines(scenes.view(8, 0), width, height)) == height
    headline = lines(view, 200)[0].split(", ")
    assert set(drawn[0].split(", ")) <= set(headline)
    assert {part for part in headline if "waiting" in part or "GiB" in part} <= set(drawn[0].split(", "))
    told = ["q quit", "arrows, PgUp, PgDn", "s sort", "r reverse", "/ filter", "d device", "c clients"]
    shown = drawn[-1].partition("   ")[2].split("  ") if width == 120 else drawn[-1].split("  ")
    assert shown == [key for key in told if key in shown]
    assert {"q quit", "/ filter", "s sort", "d device"} <= set(shown)
    assert lines(scenes.view(1, 0), width)[3].strip() in ("", "· outside the budget")


def test_every_device_is_told_and_whoever_waits_where_a_screen_is_low() -> None:
    view = scenes.view(8, 240)
    used = [f"{device.allocated / device.budget:.0%}" for device in view.devices]
    for width, height in ((80, 24), (60, 20), (40, 15)):
        drawn = lines(view, width, height)
        for index in range(8):
            assert any(re.search(rf"(^|  ) {index} (\[|  ?\d+%)", line) for line in drawn), (index, width)
        assert "WAITING" in drawn
        assert sum(line.startswith(("create", "attach", "lock")) for line in drawn) == 3
        assert len(pools(drawn)) >= 4
    assert all(any(figure in line for line in drawn) for figure in used), "a percentage is told where bytes do not fit"
    sixteen = lines(scenes.view(16, 240), 40, 15)
    assert all(any(re.search(rf"(^|  ) ?{index} ", line) for line in sixteen) for index in range(16))
    assert lines(view, 80, 6)[2] == "… the terminal is too low for the rest"


def test_the_name_of_a_device_is_whole_or_left_out() -> None:
    view = scenes.view(2, 5)
    name = "NVIDIA GeForce RTX 4090 Laptop GPU"
    view = msgspec.structs.replace(
        view, devices=tuple(msgspec.structs.replace(device, name=name) for device in view.devices)
    )
    for width in range(40, 130, 10):
        line = lines(view, width)[2]
        assert line.startswith(f" 0 {name} [" if width >= 80 else " 0 ["), width


def test_the_device_that_is_shown_alone_is_marked() -> None:
    view = scenes.view(2, 5)
    drawn = Frame(80, 24, False, Choice(device=1)).lines(view, scenes.NOW)
    marked = [
        line.plain[span.start : span.end] for line in drawn for span in line.spans if "reverse" in str(span.style)
    ]
    assert marked == [" 1"]


def test_whoever_looks_is_not_counted() -> None:
    view = scenes.view(1, 5)
    assert "9 sessions" in lines(seen_by(view.clients[0].session, view))[0]


def test_pools_that_only_processes_of_others_hold_are_told_from_those_that_nobody_holds() -> None:
    view = msgspec.structs.replace(scenes.view(1, 5), clients=())
    held = {f"{pool.name}@{pool.version}": pool.leases for pool in view.pools}
    said = {line.split()[0]: line for line in lines(view) if "@" in line}
    assert said.keys() == held.keys()
    assert all(line.endswith("other users" if held[name] else "-") for name, line in said.items())


def test_one_long_name_takes_no_columns_from_the_others() -> None:
    view = scenes.view(1, 5)
    named = msgspec.structs.replace(view.pools[0], name="x" * 255)
    drawn = lines(msgspec.structs.replace(view, pools=(named, *view.pools[1:])))
    header = next(line for line in lines(view) if line.startswith("POOL"))
    assert next(line for line in drawn if line.startswith("POOL")).split() == header.split()
    (long,) = [line for line in drawn if line.startswith("xxx")]
    assert f"xxx@{named.version} " in long
    assert all(f"{pool.name}@{pool.version}" in pools(drawn) for pool in view.pools[1:])


def test_long_names_alone_take_half_of_the_width_at_most_from_the_columns() -> None:
    view = scenes.view(1, 5)

    def columns(length: int) -> list[str]:
        named = tuple(msgspec.structs.replace(pool, name="x" * length) for pool in view.pools)
        drawn = lines(msgspec.structs.replace(view, pools=named), 100)
        return next(line for line in drawn if line.startswith("POOL")).split()

    assert columns(255) == columns(48) == ["POOL", "STATE", "SIZE", "ON", "HELD", "BY"]


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80])
def test_short_names_beside_it_leave_a_name_of_usual_length_whole(width: int) -> None:
    view = scenes.view(1, 2)
    first, second = view.pools
    two = (msgspec.structs.replace(first, name="a"), msgspec.structs.replace(second, name="llama-70b"))
    drawn = lines(msgspec.structs.replace(view, pools=two), width)
    assert f"llama-70b@{second.version}" in pools(drawn)


def test_nothing_is_said_in_a_sentence() -> None:
    sentence = "No pools: nothing has been loaded yet, or everything is retired."
    assert lines(scenes.view(1, 0))[-1] == sentence
    assert " ".join(lines(scenes.view(1, 0), 40)[-2:]) == sentence, "a narrow terminal cuts no sentence"
    nobody = Choice(listed=CLIENTS)
    assert lines(scenes.view(1, 0), choice=nobody)[-1] == "No process is attached, or none of this user."
    nobody.filter = "none such"
    assert lines(scenes.view(1, 5), choice=nobody)[-1] == "No process matches.", "once, where no key is read"
    assert "No process matches; Escape shows all." in lines(scenes.view(1, 5), height=24, choice=nobody)
    assert lines(scenes.view(1, 5), choice=Choice(filter="none such"))[-1] == "No pool matches."


def test_whatever_is_there_has_a_part_of_the_bar_however_small() -> None:
    empty = scenes.view(1, 0)

    def bar(**states: int) -> str:
        uuid = empty.devices[0].uuid
        blocks = tuple(
            BlockInfo(uuid, "x", 1, state, "freeing" if state == "freeing" else "held", nbytes, 0)
            for state, nbytes in states.items()
        )
        line = lines(msgspec.structs.replace(empty, blocks=blocks))[2]
        return line[line.index("[") + 1 : line.index("]")]

    assert bar(current=1, draft=1, superseded=1, retired=1, freeing=1).startswith("█▒▓░~ ")
    assert len(bar(current=140 * GIB, draft=1)) == len(bar())


def test_terminals_without_these_characters_have_others() -> None:
    drawn = Frame(80, None, True).lines(scenes.view(8, 5), scenes.NOW)
    assert all(line.plain.isascii() for line in drawn[2:11])


ALL = 240


@pytest.fixture(scope="module")
def crowd() -> View:
    return scenes.view(2, ALL)


def held_by(view: View, *names: str) -> View:
    """The view with a process of each name, of root and in a container, which hold the first pool for five minutes."""
    lease = LeaseInfo(view.pools[0].name, view.pools[0].version, scenes.NOW - 300)
    told = [ProcessInfo(name, "/docker/" + "3f" * 32, scenes.NOW - 7200) for name in names]
    clients = zip(view.clients, told, strict=False)
    one, *others = view.pools
    return msgspec.structs.replace(
        view,
        pools=(msgspec.structs.replace(one, leases=len(names)), *others),
        clients=tuple(
            msgspec.structs.replace(client, uid=0, state="connected", leases=(lease,), process=process)
            for client, process in clients
        ),
    )


@pytest.mark.parametrize(
    ("width", "names", "words"),
    [
        (130, ["vllm"], "5 min vllm 40000 (root, docker 3f3f3f3f3f3f)"),
        (130, ["vllm", "sglang"], "5 min vllm 40000 (root), sglang 40013 (root)"),
        (80, ["vllm"], "5 min vllm 40000 (root)"),
        (80, ["vllm", "sglang"], "5 min vllm 40000 (root) +1"),
        (40, ["vllm", "sglang"], "vllm 40000 +1"),
    ],
)
def test_a_holder_is_a_process_with_its_user_and_how_long(width: int, names: list[str], words: str) -> None:
    view = held_by(scenes.view(1, 5), *names)
    pool = view.pools[0]
    name = f"{pool.name}@{pool.version}"
    (row,) = (line for line in lines(view, width) if line.startswith(name[:4]) and "40000" in line)
    assert row.endswith(f" {words}"), row


def test_versions_of_a_long_name_can_be_told_apart() -> None:
    view = scenes.view(1, 5)
    one, other, *rest = view.pools
    name = "deepseek/r1-distill-qwen-14b-instruct-awq-w4a16-of-a-team"
    named = (msgspec.structs.replace(pool, name=name, version=11 + n) for n, pool in enumerate((one, other)))
    view = msgspec.structs.replace(view, pools=(*named, *rest))
    for width in (40, 60, 80):
        told = [line.split()[0] for line in lines(view, width) if line.startswith("deep")]
        assert sorted(cell[-3:] for cell in told) == ["@11", "@12"]


def test_columns_stay_where_they_are_while_rows_are_scrolled(crowd: View) -> None:
    def header(*pressing: str) -> str:
        return next(line for line in pressed(crowd, *pressing)[1] if line.startswith("POOL"))

    assert {header(), header("page down"), header("end")} == {header()}


def test_the_column_that_is_sorted_by_goes_last(crowd: View) -> None:
    def header(order: str) -> list[str]:
        choice = Choice()
        choice.order[POOLS] = order
        return next(line for line in lines(crowd, 60, choice=choice) if line.startswith("POOL")).split()

    assert header("size") == ["POOL", "SIZE", "HELD", "BY"]
    assert header("leases") == ["POOL", "SIZE", "LEASES", "BY"]


def test_what_is_sorted_by_size_has_falling_sizes(crowd: View) -> None:
    nbytes = {f"{pool.name}@{pool.version}": pool.nbytes for pool in crowd.pools}
    sizes = [nbytes[name] for name in pools(lines(crowd, 200))]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
def test_every_one_of_many_pools_can_be_reached_by_keys(crowd: View) -> None:
    everything = pools(lines(crowd))
    assert len(everything) == len(crowd.pools) > 200
    _, first = pressed(crowd)
    page = len(pools(first))
    _, second = pressed(crowd, "page down")
    assert pools(first) + pools(second) == everything[: 2 * page]
    assert pools(pressed(crowd, "down")[1]) == everything[1 : page + 1]
    assert pools(pressed(crowd, "end")[1]) == everything[-page:]
    assert pools(pressed(crowd, "end", "up")[1]) == everything[-page - 1 : -1]
    assert pools(pressed(crowd, "end", "page up", "home", "up")[1]) == everything[:page]
    assert pools(pressed(crowd, "end", "down", "page down")[1]) == everything[-page:]
    rest = ["page down"] * (len(everything) // page + 1)
    reached = [name for count in range(len(rest)) for name in pools(pressed(crowd, *rest[:count])[1])]
    assert set(reached) == set(everything)


def test_keys_sort_and_reverse(crowd: View) -> None:
    choice, drawn = pressed(crowd, "s")
    assert choice.order[POOLS] == "name"
    assert pools(drawn)[0].partition("@")[0] == min(pool.name for pool in crowd.pools)
    assert drawn[-2].endswith(", by name")
    _, backwards = pressed(crowd, "s", "r")
    assert pools(backwards)[0].partition("@")[0] == max(pool.name for pool in crowd.pools)
    assert ", by name, reversed" in backwards[-2]
    choice, _ = pressed(crowd, "s", "s", "s", "s")
    assert choice.order[POOLS] == "size"


def test_a_filter_is_typed_and_taken_back(crowd: View) -> None:
    wanted = {f"{pool.name}@{pool.version}" for pool in crowd.pools if "qwen" in pool.name}
    choice, drawn = pressed(crowd, "/", *"QWEN3X", "backspace")
    assert drawn[-2:] == ["filter: QWEN3_", "Enter keeps it  Escape takes it back"]
    assert set(pools(drawn)) <= wanted
    choice, drawn = pressed(crowd, "/", *"qwen", "enter")
    assert f"of {len(wanted)} pools, by size, filter qwen" in drawn[-2]
    assert choice.press("q", []) is False, "what is typed is no key any more"
    assert set(pools(pressed(crowd, "/", *"*-1@?", "enter")[1])) <= {n for n in pools(lines(crowd)) if "-1@" in n}
    _, drawn = pressed(crowd, "/", *"none such", "enter")
    assert "No pool matches; Escape shows all." in drawn
    assert drawn[-2].startswith("0 pools, by size")
    assert len(pools(pressed(crowd, "/", *"qwen", "escape")[1])) == len(pools(pressed(crowd)[1]))
    assert pressed(crowd, "/", *"qwen", "enter", "d", "escape")[0].filter == ""


def test_a_device_is_shown_alone(crowd: View) -> None:
    first, second = crowd.devices
    for presses, device in ((["d"], first), (["d", "d"], second)):
        choice, drawn = pressed(crowd, *presses)
        there = {f"{pool.name}@{pool.version}" for pool in crowd.pools if device.uuid in pool.devices}
        assert choice.device == device.index
        assert f"of {len(there)} pools" in drawn[-2]
        assert set(pools(drawn)) <= there
    assert pressed(crowd, "d", "d", "d")[0].device is None


def test_processes_are_listed_with_what_they_hold(crowd: View) -> None:
    told = ProcessInfo("vllm", "/system.slice/vllm.service", scenes.NOW - 7200)
    one, *others = crowd.clients
    lease = LeaseInfo(crowd.pools[0].name, crowd.pools[0].version, scenes.NOW - 300)
    one = msgspec.structs.replace(one, leases=(lease,), process=told)
    unknown = (msgspec.structs.replace(other, process=None) for other in others)
    view = msgspec.structs.replace(crowd, clients=(one, *unknown))
    choice, drawn = pressed(view, "c")
    assert choice.listed == CLIENTS
    header = next(line for line in drawn if "PROCESS" in line)
    row = drawn[drawn.index(header) + 1]
    assert row.split()[:2] == [str(one.pid), "vllm"], "the number of the session goes first"
    assert row.endswith(f"5 min  {lease.pool}@{lease.version}")
    assert f"of {len(view.clients)} clients, by held" in drawn[-2]
    assert drawn[-1].endswith("c pools")
    wide = lines(view, 200, 24, choice=choice)
    assert "vllm.service" in wide[wide.index(next(line for line in wide if "PROCESS" in line)) + 1]
    by_name = lines(view, 200, choice=Choice(filter=f"{lease.pool}@{lease.version}"))
    holder = next(line for line in by_name if line.startswith(f"{lease.pool}@{lease.version} "))
    assert "5 min vllm" in holder
    assert pressed(view, "c", "/", *"vllm", "enter")[1][-2].startswith("1-1 of 1 client, ")
    assert max(map(len, lines(view, 40, 24, choice=choice))) <= 40


def test_a_low_terminal_shows_a_row_at_least() -> None:
    view = scenes.view(16, 500)
    for height in (3, 6, 10):
        drawn = lines(view, 80, height)
        assert len(drawn) <= max(height, 4)
        assert len(pools(drawn)) >= 1


@pytest.mark.slow
def test_in_json_it_is_one_document(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        client.create(name, LAYOUT).seal()
        with client.attach(name):
            done = run("top", "--once", "--json", "--directory", directory)
            other = run("top", "--json", "--filter", "nothing", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert list(document) == ["schema", "time", "devices", "pools", "clients", "blocks", "waiters"]
    assert [pool["name"] for pool in document["pools"]] == [name]
    assert [client["pid"] for client in document["clients"]] == [os.getpid()]
    assert json.loads(other.stdout)["pools"] == []


@pytest.mark.slow
def test_options_choose_what_is_shown(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        for number, size in enumerate((1, 3)):
            client.create(f"{name}-{number}", Layout.pack([("x", "U8", (size << 20,))]), devices=(number,)).seal()
        for options, shown in (
            ([], [1, 0]),
            (["--sort", "name"], [0, 1]),
            (["--reverse"], [0, 1]),
            (["--filter", f"{name}-1"], [1]),
            (["--device", "cuda:0"], [0]),
        ):
            drawn = run("top", "--once", *options, "--directory", directory).stdout.splitlines()
            assert pools(drawn) == [f"{name}-{number}@1" for number in shown]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        ("\x1b[5~\x1b[6~", ["page up", "page down"]),
        ("\x1b[H\x1b[4~", ["home", "end"]),
        ("\x1b", ["escape"]),
        ("\x1b[1;5Cx", ["x"]),
        ("\x1b[200~", []),
        ("\x1b[", []),
        ("ä\x7f\r\x01", ["ä", "backspace", "enter"]),
    ],
)
def test_keys_are_told_from_what_a_terminal_sends(sent: str, expected: list[str]) -> None:
    assert split(sent) == expected


@pytest.mark.slow
def test_live_it_does_what_keys_say(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        for number in range(40):
            client.create(
                f"pool-{number:02}", Layout.pack([("x", "U8", ((50 - number) << 10,))]), devices=(number % 2,)
            ).seal()
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"1-15 of 40 pools, by size" in screen.written, "the first page")
        assert b"pool-39" not in screen.written
        for sent, shown in (
            (b"\x1b[6~", b"16-30 of 40 pools"),
            (b"\x1b[", None),
            (b"F", b"26-40 of 40 pools"),
            (b"\x1b[A", b"25-39 of 40 pools"),
            (b"s", b"by name"),
            (b"/", b"filter: _"),
            (b"3q", b"filter: 3q_"),
            (b"\x7f\r", b"1-13 of 13 pools, by name, filter 3"),
            (b"d", b"filter 3, device 0"),
            (b"dd\x1b", b"1-15 of 40 pools, by name"),
            (b"c", b"0 clients"),
        ):
            screen.written = b""
            screen.send(sent)
            if shown is not None:
                eventually(lambda shown=shown: shown in screen.written, repr(shown))  # type: ignore[misc]
        before = screen.modes()
        screen.written = b""
        screen.resize(30, 100)
        eventually(lambda: b"\x1b[?25l" in screen.written or screen.written, "another picture")
        screen.send(b"q")
        assert process.wait(PATIENCE) == 0
        assert before != screen.modes(), "lines are gathered and echoed again"
    assert b"Traceback" not in screen.written


@pytest.mark.slow
def test_keys_work_while_the_broker_does_not_answer(broker: BrokerProcess) -> None:
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        os.kill(broker.pid, signal.SIGSTOP)
        eventually(lambda: b"the broker does not answer" in screen.written, "word of that")
        screen.send(b"q")
        assert process.wait(PATIENCE) == 0
        os.kill(broker.pid, signal.SIGCONT)
