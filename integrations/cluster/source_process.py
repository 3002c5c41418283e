"""The process that has one version registered for one peer: ``python -m cubroker.integrations.cluster.source_process``.

The exporter starts it, and exchanges frames with it over its standard streams, as over connections. The process
attaches to the version that it is told, registers the memory, and reports where that is. From then on the peer reads,
and the process waits for the end of its standard input. Then it exits without a message, as it does on any signal. Its
lease ends with it, and no peer can read memory through a process that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from cubroker.client import Broker, Pool, digests
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import ExportedAllocation, ExportedVersion, Going, Reply, Serve
from cubroker.integrations.cluster.transfer_engine import (
    MemoryRegion,
    TransferEngine,
    engine_command,
    load,
    open_engine,
    own_output,
)
from cubroker.protocol.errors import CubrokerError, Invalid, Unavailable, reason

log = logging.getLogger(__name__)

START = 60.0
"""Seconds that a process has to start: it imports native libraries, perhaps from a slow disk."""

ANSWER = 120.0
"""Seconds that it has to answer: it may have to compute the digest of a large version."""


class SourceProcess:
    """The exporter's handle to such a process: sends it requests, and kills it.

    The standard input of the process ends with the exporter.
    """

    def __init__(self, process: asyncio.subprocess.Process, code: object) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._code = code
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        """Start a process, and return when it listens.

        Raises:
            Unavailable: it does not start.
        """
        command = engine_command(module, *arguments)
        code = code_on_disk()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,  # a terminal signals the exporter, which ends this process
            )
        except OSError as error:  # too few processes, descriptors or memory, as a rule
            raise Unavailable(f"a process for the transfer cannot be started: {reason(error, command[0])}") from None
        started = cls(process, code)
        try:
            messages.expect(await started.hear(START), Going)
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
        return self._process.returncode is None and not self._output.at_eof()

    @property
    def outdated(self) -> bool:
        """Whether the code on disk was replaced after its start, so that it can import no more of it."""
        return self._code != code_on_disk()

    async def ask(self, request: Serve) -> Reply:
        """Send a request and return the answer; raises ``Unavailable`` if the process ends or is silent."""
        with suppress(ConnectionError):  # `hear` notices that the process has ended
            self._input.write(messages.frame(request))
            await self._input.drain()
        return await self.hear(ANSWER)

    async def hear(self, limit: float) -> Reply:
        """Return the next message of the process, received within ``limit`` seconds; raises as :meth:`ask` does."""
        try:
            async with asyncio.timeout(limit):
                head = await self._output.readexactly(messages.LENGTH.size)
                return messages.reply(await self._output.readexactly(messages.length(head, messages.MAX_REPLY)))
        except asyncio.IncompleteReadError:
            status = await self._process.wait()
            raise Unavailable(f"the process of the transfer ended with status {status}; its log says why") from None
        except TimeoutError:
            raise Unavailable(f"the process of the transfer did not answer within {limit:g} s") from None
        except Invalid as error:
            raise Unavailable(f"the process of the transfer sent what cannot be decoded: {error.message}") from None

    async def kill(self) -> None:
        """Kill the process, unless it has ended, and return when it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def code_on_disk() -> object:
    """Return what differs once the installed code was replaced, or is missing, as by an upgrade in place."""
    try:
        found = Path(__file__).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def main(directory: str) -> None:
    """Serve one peer over standard input and output, with a session of the broker in ``directory``."""
    reading, writing = sys.stdin.buffer, own_output()
    try:
        load()
        _say(writing, Going())
        if not (body := messages.read(reading, messages.MAX_LOCAL)):
            return
        asked = messages.local(body)
        assert isinstance(asked, Serve), asked
        engine = open_engine(asked.engine)  # not before: an engine keeps a processor busy, and listens on the network
        pool, opened = _open(Path(directory), asked, engine)
    except CubrokerError as error:
        _say(writing, messages.refusal(error))
        return
    _say(writing, opened)
    log.debug("%r is read", pool)  # pool and engine are held until the end
    while reading.read(1 << 10):  # no more requests arrive; at the end the exporter has ended, or wants this to end
        pass
    os._exit(0)  # the interpreter's own exit would unmap memory that a peer may still read


def _say(stream: BinaryIO, message: Reply) -> None:
    stream.write(messages.frame(message))
    stream.flush()


def _open(directory: Path, asked: Serve, engine: TransferEngine) -> tuple[Pool, ExportedVersion]:
    """Attach to a version and register its memory; return the pool and the places of its memory."""
    broker = Broker(directory)
    info, *_ = broker.describe(asked.name, asked.version)
    device = None if info.sharded or len(info.devices) == 1 else info.devices[0]
    pool = broker.attach(asked.name, version=asked.version, device=device, unsealed=asked.unsealed)
    found: Mapping[int, bytes] = dict(enumerate(asked.digests)) or digests.sealed(
        repr(pool), pool.digest_ranges(), broker.digests(asked.name, pool.version)
    )
    host, views = broker.driver.host, pool.allocation_views
    places = [
        ExportedAllocation(view.pointer, view.nbytes, None if host else view.memory_device.index, found[number])
        for number, view in zip(pool.allocations, views, strict=True)
    ]
    with views[0].context.current():
        metadata = engine.register([MemoryRegion(each.pointer, each.nbytes, each.device) for each in places])
    return pool, ExportedVersion(
        name=pool.name,
        version=pool.version,
        layout=pool.layout.encode(),
        algorithm=digests.DEFINITION,
        places=tuple(places),
        metadata=metadata,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
