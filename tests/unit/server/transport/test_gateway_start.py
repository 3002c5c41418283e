"""A gateway that was started and has no work yet."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cubroker.protocol.errors import Unavailable
from cubroker.server.event_queue import EventQueue
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.gateway_start import GatewayStart, in_advance
from tests.brokers import PATIENCE
from tests.unit.server.processes import alive, files, gateways

LISTENS = bytes([0x90])  # the empty batch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def test_it_listens_once_it_has_the_request_socket(listener: socket.socket, path: Path) -> None:
    with closing(GatewayStart()) as start:
        start.give(listener, path)
        start.pipe.settimeout(PATIENCE)
        assert start.pipe.recv(1) == LISTENS


def test_it_ends_quietly_with_a_broker_that_has_no_work_for_it() -> None:
    with closing(GatewayStart()) as start:
        start.pipe.close()
        assert start.process.wait(PATIENCE) == 0
        assert os.read(start.errors, 1) == b""


def test_closed_it_leaves_nothing_behind() -> None:
    before = files(os.getpid())
    with closing(GatewayStart()) as start:
        pid = start.process.pid
        assert gateways(os.getpid()) == [pid]
        start.close()
    assert not alive(pid)
    assert files(os.getpid()) <= before


def test_one_that_has_ended_can_be_given_work(listener: socket.socket, path: Path) -> None:
    with closing(GatewayStart()) as start:
        start.process.kill()
        start.process.wait()
        start.give(listener, path)


def test_the_first_gateway_of_a_broker_is_the_one_that_was_started(listener: socket.socket, path: Path) -> None:
    async def test(start: GatewayStart) -> None:
        gateway = GatewayProcess(listener, path, start)
        gateway.start()
        try:
            await gateway.connect(EventQueue())
            assert gateways(os.getpid()) == [start.process.pid]
        finally:
            await gateway.stop()

    with in_advance() as start:
        assert start
        asyncio.run(test(start))
        assert not alive(start.process.pid)


def test_one_that_died_before_its_broker_needed_it_is_an_error_with_its_reason(
    listener: socket.socket, path: Path
) -> None:
    async def test(start: GatewayStart) -> None:
        gateway = GatewayProcess(listener, path, start)
        gateway.start()
        try:
            with pytest.raises(Unavailable, match="ended with status -9"):
                await gateway.connect(EventQueue())
        finally:
            await gateway.stop()

    with in_advance() as start:
        assert start
        os.kill(start.process.pid, signal.SIGKILL)
        asyncio.run(test(start))


def test_a_broker_does_without_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", never)
    before = files(os.getpid())
    with in_advance() as start:
        assert start is None
    assert files(os.getpid()) <= before
