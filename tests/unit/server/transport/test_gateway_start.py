"""A gateway that was started and has no work yet."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cubroker.server.event_queue import EventQueue
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.gateway_start import GatewayStart, in_advance
from tests.brokers import PATIENCE
from tests.unit.server.processes import alive, files, gateway_of, gateways

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


def test_it_listens_immediately_if_it_inherits_the_request_socket(listener: socket.socket, path: Path) -> None:
    with closing(GatewayStart(listener, path)) as start:
        start.pipe.settimeout(PATIENCE)
        assert start.pipe.recv(1) == LISTENS


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
        assert gateway_of(os.getpid()) == pid
        start.close()
    assert not alive(pid)
    assert files(os.getpid()) <= before


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


@pytest.mark.parametrize("why", ["it died", "too many descriptors are in flight"])
def test_one_that_gets_no_request_socket_is_replaced(
    why: str, listener: socket.socket, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    async def test(start: GatewayStart) -> None:
        gateway = GatewayProcess(listener, path, start)
        gateway.start()
        try:
            await gateway.connect(EventQueue())
            (other,) = gateways(os.getpid())
            assert other != start.process.pid
        finally:
            await gateway.stop()

    before = files(os.getpid())
    with in_advance() as start:
        assert start
        if why == "it died":
            os.kill(start.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, start.process.pid, os.WEXITED | os.WNOWAIT)
        else:
            monkeypatch.setattr(socket, "send_fds", refused)
        asyncio.run(test(start))
    assert "the gateway that was started in advance gets no work" in caplog.text
    assert files(os.getpid()) <= before


def test_one_that_its_broker_never_needed_ends_with_that() -> None:
    with in_advance() as start:
        assert start
        pid = start.process.pid
        assert alive(pid)
    assert not alive(pid)


def test_a_broker_does_without_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", never)
    before = files(os.getpid())
    with in_advance() as start:
        assert start is None
    assert files(os.getpid()) <= before
