"""Programs that use the client, each in an interpreter of its own, in which warnings are errors."""

from __future__ import annotations

import subprocess
import textwrap

from tests import forkserver
from tests.brokers import PATIENCE, BrokerProcess
from tests.forkserver import CLIENT

PREAMBLE = """
import os, signal, sys, threading
from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.unit.client import shares
shares.by_default(os.environ.get(shares.VARIABLE, shares.DEFAULT))
directory = sys.argv[1]
"""


FATAL = ("ResourceWarning", "RuntimeWarning", "DeprecationWarning", "UserWarning")
"""Warnings that are errors in a program."""


def start(
    broker: BrokerProcess, program: str, *args: str, measured: bool = True, preload: tuple[str, ...] = CLIENT
) -> subprocess.Popen[str]:
    """Start a program; it has ``directory`` and what PREAMBLE imports.

    Without ``measured`` its coverage is not: coverage's own locks do not bear being interrupted, and its warnings
    in workers would be taken for theirs.
    """
    source = PREAMBLE + textwrap.dedent(program)
    return forkserver.Forked(
        ["-c", source, str(broker.directory), *args],
        measured=measured,
        preload=preload,
        fail_on=FATAL,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    broker: BrokerProcess, program: str, *args: str, measured: bool = True, preload: tuple[str, ...] = CLIENT
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within a test's patience."""
    process = start(broker, program, *args, measured=measured, preload=preload)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
