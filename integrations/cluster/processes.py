"""Processes of ours that run an engine, as the process that starts them has them: asked in frames, and killed.

An engine is native code that a peer can bring down (:mod:`~cubroker.integrations.cluster.engine`), so it runs in a
process that has nothing else to lose. Its standard input ends with this process, and so does it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Self

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import Going, Reply, Serve
from cubroker.protocol.errors import Invalid, Unavailable

START = 60.0
"""Seconds that a process has to start: it imports native libraries, from whatever disk."""

ANSWER = 120.0
"""Seconds that it has to answer: it may have to compute the digest of a large version."""


class PythonProcess:
    """A module of ours that runs as a program."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        """Start a process, and return when it listens.

        Raises:
            Unavailable: it does not start.
        """
        started = cls(
            await asyncio.create_subprocess_exec(
                *python_command(module, *arguments), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )
        try:
            messages.expect(await started.hear(START), Going)
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self._process.returncode is None and not self._output.at_eof()

    async def ask(self, request: Serve) -> Reply:
        """Send a request and return the answer; raises ``Unavailable`` if the process ends or is silent."""
        with suppress(ConnectionError):  # its end is noticed by what it does not say
            self._input.write(messages.frame(request))
            await self._input.drain()
        return await self.hear(ANSWER)

    async def hear(self, limit: float) -> Reply:
        """Return what the process says next, within so many seconds; raises as :meth:`ask` does."""
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
            raise Unavailable(f"the process of the transfer said what cannot be read: {error.message}") from None

    async def kill(self) -> None:
        """Kill the process, unless it has ended, and return when it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this interpreter, without the current directory on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]  # noqa: TID251
