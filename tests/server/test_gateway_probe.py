"""A gateway that hangs is noticed and replaced, and one that is slow for another reason is left alone."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from cubroker.protocol.errors import Unavailable
from cubroker.server import batches, gateway_probe
from cubroker.server.gateway_probe import Probe, silence
from cubroker.server.transport import Link
from tests.server.loops import run, until
from tests.server.processes import files, gateway_of, gateways
from tests.server.test_supervisor import supervised

QUESTION = b"sixteen bytes..."

DEAF = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as pipe:
    {first}
    while pipe.recv(1 << 20):
        pass
"""
"""A gateway that takes what the broker sends and forwards nothing."""

LISTENS = "pipe.send(bytes([0x90]))"  # the empty batch


def playing(program: str, spawn: Any, while_true: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Return what starts ``program`` in the place of a gateway, as long as it is to."""

    async def start(python: str, *command: str, **options: Any) -> Any:
        if while_true():
            _, _, _, *arguments = command  # -P -m cubroker.server.gateway
            command = ("-c", program, *arguments)
        return await spawn(python, *command, **options)

    return start


def test_a_gateway_whose_pipe_answers_and_that_forwards_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = 0

    def first() -> bool:
        nonlocal starts
        starts += 1
        return starts == 1

    async def test() -> None:
        async with supervised(tmp_path) as (supervisor, told):
            await until(lambda: told)
            assert told == ["changed"]
            assert not supervisor.obstacle()

    spawn = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", playing(DEAF.format(first=LISTENS), spawn, first))
    with caplog.at_level(logging.WARNING):
        run(test())
    assert "brought back none of 4 questions in 2 s, so it was killed, and ended with status -9" in caplog.text


def test_a_gateway_that_hangs_before_it_listens_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with pytest.raises(Unavailable, match="brought back none of 3 questions"):
            async with supervised(tmp_path):
                pass

    spawn = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", playing(DEAF.format(first="pass"), spawn))
    monkeypatch.setattr(gateway_probe, "UNANSWERED_AT_START", 3)
    run(test())
    assert not gateways(os.getpid())


@pytest.mark.slow
def test_gateways_that_hang_again_and_again_leave_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (_, told):
            for _ in range(2):
                told.clear()
                os.kill(gateway_of(os.getpid()), signal.SIGSTOP)
                await until(lambda: told)
        assert not gateways(os.getpid())

    before = files(os.getpid())
    run(test())
    assert files(os.getpid()) <= before


@pytest.mark.slow
def test_a_broker_that_does_not_come_to_look_blames_nobody(tmp_path: Path) -> None:
    """As one does that is stopped for a while, or whose machine is suspended."""

    async def test() -> None:
        async with supervised(tmp_path) as (_, told):
            gateway = gateway_of(os.getpid())
            time.sleep(2 * gateway_probe.UNANSWERED * gateway_probe.INTERVAL)  # all is to stand still
            await asyncio.sleep(2 * gateway_probe.INTERVAL)
            assert gateway_of(os.getpid()) == gateway
            assert told == []

    run(test())


# -- the pipe ----------------------------------------------------------------------------------------


class Pipe:
    """Stands for the link to a gateway: whose turn it is, and whether it ended."""

    question = QUESTION

    def __init__(self, turns: Iterator[bool]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.listening.set_result(None)
        self._turns = turns

    def waits(self) -> bool:
        turn = next(self._turns, None)
        if turn is None:
            self.ended.set_result(None)
        return bool(turn)


def hangs(path: Path, turns: list[bool]) -> str:
    """Return what is said of a gateway at ``path`` in whose pipe it is its turn, or not, at each look."""
    said: list[str] = []

    async def test() -> None:
        link: Any = Pipe(iter(turns))
        said.append(await silence(link, path))

    run(test())
    return said[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_probe, "INTERVAL", 0.001)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "requests"))
        listener.listen()
        yield listener


@pytest.mark.usefixtures("quick", "listener")
def test_questions_count_when_it_is_the_gateways_turn(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    assert hangs(path, [True] * 4) == "brought back none of 4 questions in 0.004 s"
    assert hangs(path, [True] * 3) == ""
    assert hangs(path, [False] * 100) == ""
    assert hangs(path, [*[False] * 100, True] * 3) == ""
    assert hangs(path, [*[False] * 100, True] * 4)


@pytest.mark.usefixtures("quick")
def test_a_gateway_that_takes_no_connection_has_as_long_as_for_its_start(
    tmp_path: Path, listener: socket.socket
) -> None:
    path = tmp_path / "requests"
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))  # the backlog is full
        assert hangs(path, [True] * (gateway_probe.UNANSWERED_AT_START - 1)) == ""
        assert hangs(path, [True] * gateway_probe.UNANSWERED_AT_START)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failure", [errno.ENOENT, errno.EMFILE, errno.ECONNREFUSED, errno.EACCES])
def test_a_question_that_cannot_be_asked_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(Probe, "_dial", fail)
    assert hangs(tmp_path / "requests", [True] * 100) == ""


# -- over libzmq -------------------------------------------------------------------------------------


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{tmp_path / 'requests'}")
        yield router


def bounce(probe: Probe, router: zmq.Socket[bytes]) -> bool:
    """Ask, send back what comes, and return whether that is heard."""
    assert probe.ask()
    while router.poll(10):
        routing, frame = router.recv_multipart()
        assert frame == QUESTION
        router.send_multipart([routing, frame])
    return probe.answered()


def test_answers_come_back_over_libzmq_and_each_is_heard_once(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    async def test() -> None:
        probe = Probe(tmp_path / "requests", QUESTION)
        for _ in range(5):
            await until(lambda: bounce(probe, router))
            while probe.answered():
                pass
        probe.close()
        probe.close()
        assert not probe.answered()

    run(test())


def test_a_connection_that_breaks_is_made_anew(tmp_path: Path, listener: socket.socket) -> None:
    probe = Probe(tmp_path / "requests", QUESTION)
    for unread in (False, True):
        assert probe.ask()
        gateway, _ = listener.accept()
        with gateway:
            if not unread:
                gateway.recv(100)  # with something unread the connection would be reset
        assert not probe.answered()
        assert not probe.connected
    assert probe.ask()
    gateway, _ = listener.accept()
    with gateway:
        gateway.send(bytes(64))
        assert not probe.answered()
    assert probe.ask()  # found to be broken by what is sent
    assert not probe.connected
    assert probe.ask()
    assert probe.connected
    probe.close()


def test_an_answer_in_parts_is_one(tmp_path: Path, listener: socket.socket) -> None:
    probe = Probe(tmp_path / "requests", QUESTION)
    assert probe.ask()
    gateway, _ = listener.accept()
    with gateway:
        for byte in bytes(64) + QUESTION[:-1]:
            gateway.send(bytes([byte]))
            assert not probe.answered()
        gateway.send(QUESTION[-1:])
        assert probe.answered()
        assert not probe.answered()
    probe.close()


# -- the link ----------------------------------------------------------------------------------------


def test_a_link_sends_questions_back_and_hands_the_rest_over() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        received: list[list[bytes]] = []
        link = await Link.over(ours, lambda frames: received.append(list(frames)))
        with theirs:
            theirs.send(batches.encode([b"id", b"frame", b"probe", link.question, b"id", b"another"]))
            await until(lambda: received)
            assert received == [[b"id", b"frame", b"id", b"another"]]
            assert batches.Batches().feed(theirs.recv(1000)) == [[b"probe", link.question]]
            theirs.send(batches.encode([b"probe", link.question]))
            assert await asyncio.to_thread(theirs.recv, 1000)
            assert len(received) == 1
            link.close()
            await link.ended
            assert not link.waits()

    run(test())
