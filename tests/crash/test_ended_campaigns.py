"""A campaign that is ended, by an operator or a time limit, leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.brokers import PATIENCE, eventually
from tests.crash.worker_pool import ROOT
from tests.sampling import daily

CAMPAIGNS = ("kills", "restart", "restart.random_kills")
ENDINGS = (signal.SIGTERM, signal.SIGKILL)


def of_session(session: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session:
            found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "number"), daily(product(CAMPAIGNS, ENDINGS), 2))
def test_a_campaign_that_is_ended_leaves_no_process(tmp_path: Path, campaign: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.crash.{campaign}"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            eventually(lambda: [*tmp_path.glob("cubroker-*/run/broker.zmq")], "its broker to serve")
            assert len(of_session(process.pid)) > 2
            process.send_signal(number)
            process.wait(PATIENCE)
            eventually(lambda: not of_session(process.pid), "what it started to end")
        finally:
            for pid in of_session(process.pid):
                os.kill(pid, signal.SIGKILL)
    if number is signal.SIGTERM:
        assert not [*tmp_path.iterdir()]
