"""A broker under the real ``cubroker keep``, which starts the next one after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.brokers import BrokerProcess, eventually, started
from tests.forkserver import unmeasured


class KeptBroker(BrokerProcess):
    """``cubroker keep``, and the broker that is its child."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "cubroker.cli", "keep", "--pause", "0", "--", *super().command()]

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        env = unmeasured()  # tests of the keeper measure it
        return subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    def strike(self) -> None:
        """Send the broker SIGKILL, and return when the next one serves."""
        starts = self._starts()
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        broker, *_ = children.split()  # in the order of their start; the next one may stand by
        os.kill(int(broker), signal.SIGKILL)
        eventually(lambda: self._starts() > starts, "the next broker")

    def _starts(self) -> int:
        return self.log().count("cubroker: serving on ")


def keeping() -> AbstractContextManager[KeptBroker]:
    """Start a keeper with a broker on a fresh directory, and stop both at the end."""
    return started(KeptBroker)
