"""A Python that was built against an older C library, as conda's are and many of uv's, and so names less of Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores import storing

LESS = """
import fcntl, os

for module in (fcntl, os):
    for name in list(vars(module)):
        if name.startswith(("MFD_", "RWF_", "F_SEAL", "F_ADD_SEALS", "F_GET_SEALS", "F_OFD_", "PIDFD_")):
            delattr(module, name)
del os.memfd_create, os.pidfd_open
"""

WORKER = """
import os, sys
from cubroker.client import Broker
from tests.crash.content import Form, check

assert not hasattr(os, "memfd_create")
with Broker(sys.argv[1]) as broker:
    if not broker.pools():
        Form("vmm", durable=True).publish(broker, "pool")
    with broker.attach("pool") as pool:
        check(pool)
"""


@pytest.mark.slow
def test_it_serves_and_keeps_and_reads_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LESS)
    path = (str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    keep = [sys.executable, "-m", "cubroker.cli", "keep", "--", "true"]
    assert "ended with status 0" in subprocess.run(keep, check=True, stderr=subprocess.PIPE, text=True).stderr
    with storing() as broker:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", WORKER, str(broker.directory)], check=True)
            broker.restart()
