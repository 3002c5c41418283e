"""No memory to watch one more file, and no thread to be had: who asks is refused, and everything else goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from cubroker.driver import load
from cubroker.protocol.messages import Refused, Welcome
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import MulticastBinder
from cubroker.server.devices.mapped_memory import MappedChecks
from cubroker.server.event_queue import ClientGreeted, Event, EventQueue
from cubroker.server.ledger import Budget, Ledger
from cubroker.server.monitoring.observer import LedgerObserver
from cubroker.server.transport import admission
from cubroker.server.transport import gateway_process as transport
from cubroker.server.transport.admission import Listener
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.unix_sockets import Peer
from tests.faults import fail_nth
from tests.unit.server.clients import HELLO, hear
from tests.unit.server.loops import Checks, Gateway, Recorder, run, until
from tests.unit.server.processes import files, gateway_of, gateways
from tests.unit.server.transport.test_requests import LARGE, create, desk

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("at", [1, 2])
def test_a_process_that_cannot_be_watched_gets_no_session(monkeypatch: Patch, at: int) -> None:
    async def test() -> None:
        before = files(os.getpid())
        queue = EventQueue()
        ledger = Ledger([Budget(0, "HOST-0", "device", 1, 1)], 0)
        nothing = cast(MulticastBinder, None)
        gateway, checks = cast(GatewayProcess, Gateway()), cast(MappedChecks, Checks())
        broker = Broker(queue, ledger, {}, nothing, load("host:1"), gateway, LedgerObserver(ledger), checks)
        for expected in (Refused, Welcome):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            peer = Peer(os.getpid(), 0, 0, os.pidfd_open(os.getpid()))
            with monkeypatch.context() as broken, theirs:
                if expected is Refused:
                    loop = asyncio.get_running_loop()
                    fail_nth(broken, loop, "add_reader", at, OSError(errno.ENOSPC, "No space left on device"))
                queue.put(ClientGreeted(ours, peer, 1))
                answer = hear(theirs)
                assert isinstance(answer, expected), answer
                if isinstance(answer, Refused):
                    assert answer.code == "unavailable"
                    assert "No space left" in answer.message
        broker.close("the end")
        assert files(os.getpid()) <= before

    run(test())


class Hall:
    """A door on a listening socket, and who came in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.listener.bind(str(path))
        self.listener.listen()
        self.admitted: list[socket.socket] = []
        queue = EventQueue()
        queue.attach(self.step)
        self.door = Listener(self.listener, queue)

    def step(self, event: Event) -> None:
        assert isinstance(event, ClientGreeted)
        self.admitted.append(event.connection)
        os.close(event.peer.pidfd)

    async def enter(self) -> socket.socket:
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guest.connect(str(self.path))
        guest.send(HELLO)
        return guest

    def close(self) -> None:
        self.door.close()
        for end in (self.listener, *self.admitted):
            end.close()


def test_a_door_that_cannot_be_watched_is_opened_later(tmp_path: Path, monkeypatch: Patch) -> None:
    async def test() -> None:
        hall = Hall(tmp_path / "door")
        calls = fail_nth(monkeypatch, asyncio.get_running_loop(), "add_reader", 1, OSError(errno.ENOMEM, "none"))
        hall.door.open()
        guest = await hall.enter()
        await until(lambda: hall.admitted)
        assert calls() == 3
        guest.close()
        hall.close()

    monkeypatch.setattr(admission, "PAUSE", 0.01)
    run(test())


def test_a_guest_who_cannot_be_listened_to_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    async def test() -> None:
        hall = Hall(tmp_path / "door")
        hall.door.open()
        fail_nth(monkeypatch, asyncio.get_running_loop(), "add_reader", 1, OSError(errno.ENOMEM, "no memory"))
        with await hall.enter() as guest:
            before = files(os.getpid())  # it has not been let in yet
            guest.setblocking(False)
            refused: list[Refused | Welcome] = []
            await until(lambda: refused or _heard(guest, refused))
            assert refused == [
                Refused(
                    "unavailable",
                    "the broker cannot listen to this connection: no memory; free memory, or raise the memory limit of"
                    " this process or its container",
                )
            ]
            await until(lambda: files(os.getpid()) <= before)
        with await hall.enter():
            await until(lambda: hall.admitted)
        hall.close()

    run(test())


def _heard(guest: socket.socket, answers: list[Refused | Welcome]) -> bool:
    try:
        answers.append(hear(guest))
    except BlockingIOError:
        return False
    return True


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def no_memory(*_: Any) -> None:
    raise MemoryError


def test_a_layout_is_checked_though_no_thread_can_be_had_any_more(monkeypatch: Patch) -> None:
    async def test() -> None:
        async with desk() as at:
            monkeypatch.setattr(threading.Thread, "start", no_thread)
            at.send(create(LARGE.encode()))
            await until(lambda: at.asked)
            assert at.asked[0].layout == LARGE.outline
            monkeypatch.undo()

    run(test())


@asynccontextmanager
async def gateway_process(tmp_path: Path) -> AsyncIterator[Recorder]:
    """A gateway that listens, and the queue that hears of later ones."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "requests"))
        listener.listen()
        gateway, broker = GatewayProcess(listener, tmp_path / "requests"), Recorder()
        gateway.start()
        await gateway.connect(broker.queue)
        try:
            yield broker
        finally:
            await gateway.stop()


def test_a_gateway_is_started_again_though_no_thread_can_be_had_any_more(tmp_path: Path, monkeypatch: Patch) -> None:
    async def test() -> None:
        async with gateway_process(tmp_path) as broker:
            monkeypatch.setattr(threading.Thread, "start", no_thread)
            os.kill(gateway_of(os.getpid()), signal.SIGKILL)
            await until(lambda: broker.events)

    run(test())


@pytest.mark.parametrize("at", [1, 2])
def test_a_gateway_that_cannot_be_watched_is_not_the_last(tmp_path: Path, monkeypatch: Patch, at: int) -> None:
    async def test() -> None:
        async with gateway_process(tmp_path) as broker:
            before, loop = files(os.getpid()), asyncio.get_running_loop()
            count = fail_nth(monkeypatch, loop, "add_reader", at, OSError(errno.ENOSPC, "No space left on device"))
            os.kill(gateway_of(os.getpid()), signal.SIGKILL)
            await until(lambda: broker.events)
            assert count() == at + 2
            assert len(gateways(os.getpid())) == 1
            # As many as before: the pipes and the pidfd are others.
            await until(lambda: files(os.getpid()).total() <= before.total())

    run(test())


@pytest.mark.parametrize("step", ["remove_reader", "_listen", "end", "last_words", "Popen", "watch"])
def test_a_gateway_is_started_again_after_a_moment_without_memory(
    tmp_path: Path, monkeypatch: Patch, step: str
) -> None:
    async def test() -> None:
        async with gateway_process(tmp_path) as broker:
            places = {"remove_reader": asyncio.get_running_loop(), "Popen": subprocess, "watch": transport}
            count = fail_nth(monkeypatch, places.get(step, transport.GatewayChild), step, 1, MemoryError())
            os.kill(gateway_of(os.getpid()), signal.SIGKILL)
            await until(lambda: broker.events)
            assert count()
            assert len(gateways(os.getpid())) == 1

    run(test())
