"""Programs that use the client, each in an interpreter of its own, which reports any warning as an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.brokers import PATIENCE, BrokerProcess

PREAMBLE = """
import os, signal, sys, threading
from cubroker.client import Broker
from cubroker.protocol import Layout
directory = sys.argv[1]
"""


def start(broker: BrokerProcess, program: str, *args: str) -> subprocess.Popen[str]:
    """Start a program; it has ``directory`` and what PREAMBLE imports."""
    source = PREAMBLE + textwrap.dedent(program)
    command = [sys.executable, "-W", "error", "-c", source, str(broker.directory), *args]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(broker: BrokerProcess, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within a test's patience."""
    process = start(broker, program, *args)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
