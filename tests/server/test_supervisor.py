from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cubroker.protocol.errors import Unavailable
from cubroker.server import supervisor as supervisors
from cubroker.server.supervisor import Supervisor
from tests.brokers import PATIENCE
from tests.server.loops import run, until
from tests.server.processes import gateway_of, gateways


@asynccontextmanager
async def supervised(tmp_path: Path) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    """A supervisor, started and connected, and what it told the broker."""
    path = tmp_path / "requests"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        supervisor = Supervisor(listener, path)
        told: list[str] = []
        supervisor.start()
        try:
            await supervisor.connect(lambda batch: told.append("batch"), lambda: told.append("changed"))
            yield supervisor, told
        finally:
            await supervisor.stop()


def test_a_gateway_that_cannot_be_started_again_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0
    spawn = asyncio.create_subprocess_exec

    async def scarce(*command: Any, **options: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(11, "Resource temporarily unavailable")
        return await spawn(*command, **options)

    async def test() -> None:
        async with supervised(tmp_path) as (supervisor, told):
            monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
            assert not supervisor.obstacle()
            os.kill(gateway_of(os.getpid()), signal.SIGKILL)
            await until(lambda: attempts)
            assert supervisor.obstacle() == "its gateway is being started again"
            await until(lambda: told)
            assert told == ["changed"]
            assert not supervisor.obstacle()
            assert attempts == 3
            supervisor.send([b"nobody", b"hears this"])

    run(test())


def test_a_gateway_that_cannot_be_started_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*command: Any, **options: Any) -> Any:
        raise FileNotFoundError(2, "no python")

    async def test() -> None:
        with pytest.raises(Unavailable, match="no python"):
            async with supervised(tmp_path):
                pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    run(test())


def test_answers_for_a_gateway_that_is_gone_are_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (supervisor, told):
            await supervisor.stop()
            supervisor.send([b"nobody", b"hears this"])
            assert told == []

    run(test())


def test_a_gateway_that_fails_ends_by_itself_and_its_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (supervisor, told):
            for _ in range(2):
                told.clear()
                supervisor.send([b"a routing id without a frame"])
                await until(lambda: told)

    monkeypatch.setattr(supervisors, "GRACE", PATIENCE)  # a busy machine takes its time to end a process
    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.text.count("Traceback") == 2
    assert caplog.text.count("ended with status 1 (ValueError: ") == 2


def test_a_gateway_that_hangs_after_its_end_of_the_pipe_closed_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as (supervisor, told):
            gateway = gateway_of(os.getpid())
            os.kill(gateway, signal.SIGSTOP)
            assert supervisor._link
            supervisor._link.close()
            await until(lambda: told)

    monkeypatch.setattr(supervisors, "GRACE", 0.01)
    with caplog.at_level(logging.WARNING):
        run(test())
    assert "ended with status -9" in caplog.text


TALKS = "import sys; sys.stderr.write('much\\n' * 200_000 + 'the end')"


def test_a_gateway_that_says_much_is_heard_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawn = asyncio.create_subprocess_exec

    async def talkative(program: str, *_: str, **options: Any) -> Any:
        return await spawn(program, "-c", TALKS, **options)

    async def test() -> None:
        with pytest.raises(Unavailable, match="the end"):
            async with supervised(tmp_path):
                pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", talkative)
    with caplog.at_level(logging.ERROR):
        run(test())
    assert caplog.text.count("much") < supervisors.LAST_WORDS


def test_a_supervisor_that_is_stopped_as_it_starts_leaves_no_process(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            supervisor = Supervisor(listener, tmp_path / "requests")
            supervisor.start()
            await asyncio.sleep(0)  # the task has begun
            await supervisor.stop()

    run(test())
    assert not gateways(os.getpid())
