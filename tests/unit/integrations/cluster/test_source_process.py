"""Processes that have a version registered, as the exporter has them: started, asked, silent, and at their end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cubroker.integrations.cluster import exporter, messages, source_process
from cubroker.integrations.cluster.messages import ExportedVersion, PeerRefusal, Serve
from cubroker.integrations.cluster.source_process import SourceProcess
from cubroker.integrations.cluster.transfer_engine import NIXL
from cubroker.protocol import Layout
from cubroker.protocol.errors import Unavailable
from tests.brokers import PATIENCE, eventually
from tests.cluster import ENGINE, need_engine
from tests.unit.integrations.cluster.hosts import LAYOUT, here, leases, publish


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes have an engine that moves nothing."""
    monkeypatch.setenv("PYTHONPATH", here())


def ended(directory: Path, *requests: Serve) -> tuple[list[messages.Reply], int]:
    """Ask a process, and end its input; returns its answers and its status."""

    async def run() -> tuple[list[messages.Reply], int]:
        process = await SourceProcess.start("plain_source", str(directory))
        try:
            answers = [await process.ask(each) for each in requests]
            assert process.alive or isinstance(answers[-1], PeerRefusal)
            process._input.close()
            return answers, await asyncio.wait_for(process._process.wait(), PATIENCE)
        finally:
            await process.kill()

    return asyncio.run(run())


def test_a_process_ends_with_its_input_and_the_lease_with_it(directory: Path, name: str) -> None:
    publish(directory, name)
    (opened,), status = ended(directory, Serve(name, 1, NIXL))
    assert status == 0
    assert isinstance(opened, ExportedVersion)
    assert (opened.name, opened.version, Layout.decode(opened.layout)) == (name, 1, LAYOUT)
    eventually(lambda: not leases(directory), "the lease to end")


def test_a_process_that_waits_for_a_peer_has_no_engine_yet(
    monkeypatch: pytest.MonkeyPatch, directory: Path, name: str
) -> None:
    """One would keep a processor busy, and listen at a port that asks nobody for a certificate."""
    need_engine()
    for variable, value in ENGINE.items():
        monkeypatch.setenv(variable, value)
    publish(directory, name)

    async def run() -> tuple[bool, bool]:
        process = await SourceProcess.start(exporter.SOURCE, str(directory))
        try:
            before = listens(process._process.pid)
            messages.expect(await process.ask(Serve(name, 1, NIXL)), ExportedVersion)
            return before, listens(process._process.pid)
        finally:
            await process.kill()

    assert asyncio.run(run()) == (False, True)


def listens(pid: int) -> bool:
    """Whether a process has a TCP socket that listens."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return any(str(each.readlink()) in listening for each in Path(f"/proc/{pid}/fd").iterdir())


def test_a_terminal_does_not_interrupt_a_process_before_the_exporter_ends_it(directory: Path) -> None:
    """It would print a traceback while it imports libraries."""

    async def run() -> int:
        process = await SourceProcess.start("plain_source", str(directory))
        try:
            return os.getpgid(process._process.pid)
        finally:
            await process.kill()

    assert asyncio.run(run()) != os.getpgrp()


def test_a_process_that_is_asked_for_nothing_ends_too(directory: Path) -> None:
    assert ended(directory) == ([], 0)


def test_what_a_process_cannot_open_is_its_answer_and_its_end(directory: Path, name: str) -> None:
    publish(directory, name)
    for request, code in ((Serve(name, 1, "pigeons"), "unsupported"), (Serve("none", 1, NIXL), "not_found")):
        (answer,), status = ended(directory, request)
        assert isinstance(answer, PeerRefusal)
        assert (answer.code, status) == (code, 0)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("this", "sent what cannot be decoded: received a frame of"),
        ("no_such_module", "ended with status 1; its log says why"),
    ],
)
def test_a_process_that_does_not_work_is_an_error(module: str, why: str) -> None:
    with pytest.raises(Unavailable, match=f"the process of the transfer {why}"):
        asyncio.run(SourceProcess.start(module))


def test_a_process_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(source_process, "START", 0.01)
    with pytest.raises(Unavailable, match=r"did not answer within 0\.01 s"):
        asyncio.run(SourceProcess.start("plain_source", str(directory)))


def test_a_process_that_has_ended_answers_nothing(directory: Path) -> None:
    async def run() -> None:
        process = await SourceProcess.start("plain_source", str(directory))
        await process.kill()
        await process.kill()
        assert not process.alive
        with pytest.raises(Unavailable, match="the process of the transfer ended with status -9"):
            await process.ask(Serve("m", 1, NIXL))

    asyncio.run(run())
