"""A keeper that is a service itself: what its own service manager gives, gets and decides."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest

from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Datagram, close_all
from tests.brokers import PATIENCE
from tests.stores import FdStore, fill
from tests.unit.cli.processes import environment, run
from tests.unit.server.keeper.harness import Keep, contents, memory

STORE = 100  #: Descriptors that the manager says it stores.


@pytest.fixture
def above(tmp_path: Path) -> Iterator[FdStore]:
    """The service manager of a keeper."""
    store = FdStore(tmp_path / "above")
    yield store
    store.close()


def managed(
    directory: Path,
    address: Path,
    *options: str,
    store: int = STORE,
    watchdog: float = 0.0,
    inherited: dict[str, int] | None = None,
) -> Keep:
    """Return a keeper with a service manager of its own."""
    variables = {"NOTIFY_SOCKET": str(address), "FDSTORE": str(store), "WATCHDOG_USEC": f"{watchdog * 1e6:.0f}"}
    return Keep(directory, "--pause", "0", *options, variables=variables, inherited=inherited)


@pytest.fixture
def keep(tmp_path: Path, above: FdStore) -> Iterator[Keep]:
    with managed(tmp_path, above.path) as process:
        yield process


def none_follows(keep: Keep) -> bool:
    """Whether no run begins for a moment."""
    return not select.select([keep.listener], [], [], 0.1)[0]


def test_what_it_is_started_with_reaches_every_run_and_takes_no_room(tmp_path: Path, above: FdStore) -> None:
    with (
        memory(b"socket") as listening,
        memory(b"kept") as kept,
        managed(tmp_path, above.path, store=2, inherited={"cubroker": listening, "m1": kept}) as keep,
    ):
        first = keep.next()
        assert first.hello["limit"] == 2
        assert first.inherited == {"cubroker": 1, "m1": 1}
        for name in ("m2", "m3", "m4"):
            with memory(b"") as file:
                first.store(name, file)
        keep.says("THE STORE IS FULL with 4 of 4 descriptors.*'m4' are dropped")
        second = keep.again(first)
        assert second.inherited == {"cubroker": 1, "m1": 1, "m2": 1, "m3": 1}
        assert contents(second.give("m1")) == [b"kept"]


def test_what_is_stored_is_with_both_and_outlives_a_keeper_that_is_killed(
    keep: Keep, above: FdStore, tmp_path: Path
) -> None:
    first = keep.next()
    with memory(b"kept") as file:
        first.store("m1", file)
        first.store("gone", file)
    first.say("removing", "gone")
    second = keep.again(first)
    assert second.inherited == {"m1": 1}
    keep.process.kill()
    keep.process.wait()
    above.settle()
    assert set(above.stored) == {"m1"}
    later = tmp_path / "later"
    later.mkdir()
    with managed(later, above.path, inherited={"m1": above.stored["m1"][0]}) as another:
        assert contents(another.next().give("m1")) == [b"kept"]


@pytest.mark.parametrize(
    ("store", "options", "limit"),
    [(7, (), 7), (7, ("--descriptors", "9"), 7), (7, ("--descriptors", "5"), 5), (9999, (), 5242)],
)
def test_the_smaller_of_both_stores_counts(
    tmp_path: Path, above: FdStore, store: int, options: tuple[str, ...], limit: int
) -> None:
    with managed(tmp_path, above.path, *options, store=store) as keep:
        assert keep.next().hello["limit"] == limit


def test_its_manager_has_it_make_way_for_the_next_start_by_sigusr1(keep: Keep) -> None:
    first = keep.next()
    first.expect(signal.SIGUSR1)
    assert keep.end(signal.SIGUSR1) == 100 + signal.SIGUSR1
    assert "SIGUSR1: waits for the end of the process" in keep.said()


def test_a_start_that_fails_is_left_to_its_manager_and_one_that_is_killed_is_not(keep: Keep, above: FdStore) -> None:
    first = keep.next()
    with memory(b"") as file:
        first.store("m1", file)
    first.kill()
    keep.next().exit(9)
    keep.next(ready=False).kill()
    third = keep.next(ready=False)
    assert third.inherited == {"m1": 1}
    third.exit(3)
    assert keep.status() == 3
    assert keep.said().endswith("gives up: the start failed, and the service manager keeps what is stored\n")
    above.settle()
    assert ("STATUS", f"process {first.pid} was killed by SIGKILL") in above.said
    assert ("STATUS", f"process {third.pid} ended with status 3") in above.said
    assert set(above.stored) == {"m1"}


def test_a_manager_that_stores_nothing_changes_neither_signals_nor_starts_nor_the_limit(
    tmp_path: Path, above: FdStore
) -> None:
    with managed(tmp_path, above.path, store=0) as keep:
        first = keep.next()
        assert first.hello["limit"] == 4096
        first.expect(signal.SIGUSR1)
        keep.process.send_signal(signal.SIGUSR1)
        first.ended()
        keep.next(ready=False).exit(3)
        last = keep.next()
        with above.deaf():
            last.kill()
            keep.next(ready=False)


def test_a_first_start_that_fails_is_the_end_where_sockets_alone_were_inherited_and_nothing_is_stored(
    tmp_path: Path, above: FdStore
) -> None:
    with memory(b"") as listening, managed(tmp_path, above.path, store=0, inherited={"cubroker": listening}) as keep:
        keep.next(ready=False).exit(3)
        assert keep.status() == 3
        assert "gives up: the first start did not get ready" in keep.said()


def test_it_ends_by_the_signal_that_ended_the_process(keep: Keep) -> None:
    keep.next()
    assert keep.end() == -signal.SIGTERM


def test_a_process_that_had_to_be_killed_leaves_to_the_manager_what_it_stored(tmp_path: Path, above: FdStore) -> None:
    with managed(tmp_path, above.path, "--stop-timeout", "0.1") as keep:
        first = keep.next()
        first.ignore(signal.SIGTERM)
        with memory(b"") as file:
            first.store("m1", file)
        assert keep.end() == -signal.SIGKILL
        assert "1 stored descriptors are left to the service manager: m1" in keep.said()
        above.settle()
        assert set(above.stored) == {"m1"}


def test_an_address_at_which_no_manager_is_any_more_is_ignored(tmp_path: Path) -> None:
    with managed(tmp_path, tmp_path / "gone") as keep:
        keep.next()  # which speaks to no other manager than the keeper
        address = tmp_path / "gone"
        keep.says(f"continues without a service manager: .* at {address} cannot be told STATUS=starts")


def test_the_address_of_another_process_is_not_passed_on(tmp_path: Path, above: FdStore) -> None:
    with Keep(tmp_path, variables={"KEEPER_NOTIFY_SOCKET": str(above.path)}) as keep:
        keep.next()
        above.settle()
        assert above.said == []


def test_an_address_that_is_none_is_refused() -> None:
    done = run("keep", "--", "true", env=environment(NOTIFY_SOCKET="relative"))
    assert done.returncode == 1
    assert "NOTIFY_SOCKET is 'relative'" in done.stderr


# -- the end of a run, which waits for the manager ---------------------------------------------------------


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[socket]:
    """Where a manager listens that handles nothing but by the test. A test closes it before its keeper is to end."""
    with sd_notify.listen(str(tmp_path / "held")) as listening:
        yield listening


def heard(channel: socket, text: bytes) -> Datagram:
    """Take messages until one is ``text``, and return that."""
    while True:
        assert select.select([channel], [], [], PATIENCE)[0], f"no {text!r}"
        message = sd_notify.receive(channel)
        assert message
        if message.data == text:
            return message
        close_all(message.descriptors)


def test_no_run_follows_before_the_manager_has_handled_the_messages_of_the_last(
    tmp_path: Path, channel: socket
) -> None:
    with managed(tmp_path, tmp_path / "held") as keep, channel:
        first = keep.next()
        first.kill()
        barrier = heard(channel, b"BARRIER=1")
        assert none_follows(keep)
        state = Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "Z", "systemd finds the service of a message by its sender"
        close_all(barrier.descriptors)
        keep.next()
        heard(channel, f"STATUS=process {first.pid} was killed by SIGKILL".encode())


def test_no_run_follows_while_the_manager_has_no_room(keep: Keep, above: FdStore) -> None:
    first = keep.next()
    with above.deaf():
        first.kill()
        assert none_follows(keep)
    keep.next()


@pytest.mark.parametrize("full", [False, True])
def test_a_manager_that_is_gone_holds_up_no_run(tmp_path: Path, channel: socket, full: bool) -> None:
    with managed(tmp_path, tmp_path / "held") as keep:
        first = keep.next()
        if full:
            fill(tmp_path / "held")
        first.kill()
        assert none_follows(keep)
        channel.close()
        keep.next(ready=False)


def test_the_end_that_was_asked_for_meanwhile_comes_after_it(tmp_path: Path, channel: socket) -> None:
    with managed(tmp_path, tmp_path / "held") as keep:
        keep.next().kill()
        barrier = heard(channel, b"BARRIER=1")
        keep.process.send_signal(signal.SIGTERM)
        keep.says("SIGTERM: waits for the end of the process")
        assert none_follows(keep)
        close_all(barrier.descriptors)
        assert keep.status() == -signal.SIGKILL


@pytest.mark.slow
def test_it_gives_signs_of_life_while_the_process_gives_none_and_while_it_waits(
    tmp_path: Path, channel: socket
) -> None:
    with managed(tmp_path, tmp_path / "held", watchdog=1.0) as keep, channel:
        first = keep.next()
        assert first.hello["watchdog"] is None
        first.stop()
        for _ in range(2):
            heard(channel, sd_notify.WATCHDOG.encode())
        first.kill()
        barrier = heard(channel, b"BARRIER=1")
        for _ in range(2):
            heard(channel, sd_notify.WATCHDOG.encode())
        close_all(barrier.descriptors)


def test_a_sign_of_life_for_which_there_was_no_room_is_given_again_soon(tmp_path: Path, channel: socket) -> None:
    fill(tmp_path / "held")
    with managed(tmp_path, tmp_path / "held", watchdog=100 * PATIENCE) as keep, channel:
        keep.next(ready=False)
        heard(channel, sd_notify.WATCHDOG.encode())
