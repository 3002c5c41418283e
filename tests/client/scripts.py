"""Programs that use the client, each in an interpreter of its own, in which warnings are errors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tests.brokers import PATIENCE, BrokerProcess

PREAMBLE = """
import os, signal, sys, threading
from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.client import shares
shares.by_default(os.environ.get(shares.VARIABLE, shares.DEFAULT))
directory = sys.argv[1]
"""


def start(broker: BrokerProcess, program: str, *args: str, measured: bool = True) -> subprocess.Popen[str]:
    """Start a program; it has ``directory`` and what PREAMBLE imports.

    Without ``measured`` its coverage is not: coverage's own locks do not bear being interrupted, and its warnings
    in workers would be taken for theirs.
    """
    source = PREAMBLE + textwrap.dedent(program)
    strict = [f"-Werror::{kind}Warning" for kind in ("Resource", "Runtime", "Deprecation", "User")]
    return subprocess.Popen(
        [sys.executable, *strict, "-c", source, str(broker.directory), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if measured or not name.startswith("COVERAGE_")},
    )


def run(broker: BrokerProcess, program: str, *args: str, measured: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within a test's patience."""
    process = start(broker, program, *args, measured=measured)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
