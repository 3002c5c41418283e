"""Processes that may hang or die in a driver: started, given a time limit, and read."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from cubroker.cli.doctor.facts import Trial
from cubroker.server import python

R = TypeVar("R")

GRACE = 1.0
"""Seconds that a killed process may take to go; one that the kernel's driver holds on to does not go."""


def command(*arguments: str) -> list[str]:
    """Return the command line of a trial, which ends with this process if not before."""
    return python.command("cubroker.cli.doctor.trials", str(os.getpid()), *arguments)


async def ask(line: Sequence[str], limit: float, kind: type[R]) -> R | Trial:
    """Run a command line and return the ``kind`` that it prints, or what became of it within ``limit`` seconds."""
    process = await asyncio.create_subprocess_exec(*line, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(limit):
            out, errors = await process.communicate()
    except TimeoutError:
        return Trial("silent", detail=f"{limit:g} s")
    finally:
        await _end(process)
    assert process.returncode is not None
    return read(process.returncode, out, errors, kind)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await process.wait()


def read(status: int, out: bytes, errors: bytes, kind: type[R]) -> R | Trial:
    """Return what a process printed last, or that it died of something; libraries may print before it."""
    lines = out.splitlines()
    if status == 0 and lines:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(lines[-1], type=kind)
    said = errors.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    return Trial("died", detail=f"{signal.Signals(-status).name}" if status < 0 else f"status {status}: {last}")
