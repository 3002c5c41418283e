"""The broker's service inside a lab, as a test has it."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.brokers import PATIENCE, eventually
from tests.systemd.clients import Client
from tests.systemd.lab import Lab

SERVICE = "cubroker.service"
SOCKETS = ("cubroker.socket", "cubroker-requests.socket")
SETTINGS = "/etc/cubroker/cubroker.toml"
TEXT = 'devices = "host:2@64MiB"\n'
DROP_IN = "/run/systemd/system/cubroker.service.d/test.conf"
STANDBY = "/usr/local/share/doc/cubroker/standby.conf"
STANDBY_DROP_IN = "/run/systemd/system/cubroker.service.d/standby.conf"
LOCK = "/run/cubroker/lock"

STANDING_BY = pytest.mark.parametrize("service", [True], ids=["standby"], indirect=True)
EITHER = pytest.mark.parametrize("service", [False, True], ids=["unit", "standby"], indirect=True)
"""Marks of tests of the unit as it is, and with the drop-in by which the next broker stands by."""

MEMORY = """
for file in /proc/$1/fd/*; do
  case "$(readlink "$file")" in /memfd:cubroker-device*) stat --dereference --format=%i "$file" ;; esac
done
"""
"""Prints the inodes of devices' memory that process $1 has open."""


class Service:
    """``cubroker.service`` and its sockets.

    Attributes:
        kept: whether the next broker stands by, so that the main process is its keeper.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.kept = False

    @property
    def main(self) -> int:
        """The id of the unit's main process inside the lab; 0 while there is none."""
        return int(self.lab.show(SERVICE, "MainPID"))

    @property
    def pid(self) -> int:
        """The id inside the lab of the broker's process, or of the last broker; 0 while the unit has no process."""
        main = self.main
        return int(self.lab.run("cat", LOCK).stdout) if main and self.kept else main

    @property
    def version(self) -> str:
        """Which of the installed versions runs."""
        command = self.lab.run("cat", f"/proc/{self.pid}/cmdline").stdout
        return command.removeprefix("/opt/cubroker/").partition("/")[0]

    @property
    def starts_again(self) -> int:
        """How often systemd has started it by itself."""
        return int(self.lab.show(SERVICE, "NRestarts"))

    @property
    def stored(self) -> int:
        """How many descriptors systemd keeps for it."""
        return int(self.lab.show(SERVICE, "NFileDescriptorStore"))

    def start(self) -> None:
        self.lab.systemctl("start", SERVICE)

    def stop(self) -> None:
        """Stop it and its sockets, so that nobody who connects starts it, and have what is stored dropped."""
        self.lab.run("systemctl", "disable", SERVICE)  # of one that is enabled it stays, from systemd 254 on
        self.lab.systemctl("stop", SERVICE, *SOCKETS)
        assert not self.stored
        self.lab.run("systemctl", "reset-failed", SERVICE, check=False)

    def signal(self, number: signal.Signals) -> None:
        """Send the broker a signal, if there is one."""
        if pid := self.pid:
            self.lab.run("kill", f"-{number.name}", str(pid), check=False)

    def killed(self) -> None:
        """Kill the broker, and return when the next one serves."""
        before = self.pid
        self.signal(signal.SIGKILL)
        self.replaces(before)

    def replaces(self, before: int) -> None:
        """Return when another broker serves than the one whose id is given."""
        eventually(lambda: self.pid not in (0, before), "another broker")
        self.serves()

    def serves(self) -> None:
        """Return when the broker has said that it serves; with a keeper, the unit is active without a broker, too."""
        eventually(lambda: self.lab.show(SERVICE, "ActiveState") == "active", "the broker to serve")
        if self.kept:
            self.cubroker("ping")

    def configure(self, unit: str) -> None:
        """Have the next start use these lines of a unit as well; none of them if they are empty."""
        self.lab.write(DROP_IN, unit)
        self.lab.systemctl("daemon-reload")

    def stand_by(self, *options: str) -> None:
        """Have the next start use the drop-in with which the next broker stands by, with options for its keeper."""
        text = self.lab.run("cat", STANDBY).stdout
        changed = text.replace("cubroker keep ", " ".join(("cubroker keep", *options, "")), 1)
        self.lab.write(STANDBY_DROP_IN, changed)
        self.lab.systemctl("daemon-reload")
        self.kept = True

    def stands_by(self) -> None:
        """Return when the next broker stands by."""
        pid = self.pid
        ready, waits = f"process {pid} is ready", "stands by"
        eventually(lambda: waits in self.lab.log(SERVICE).rpartition(ready)[2], "the next broker to stand by")

    def says(self, words: str) -> None:
        """Return when the journal has these words of the service: lines of a log take a way of their own."""
        eventually(lambda: words in self.lab.log(SERVICE), f"{words!r} in the journal")

    def cubroker(self, *arguments: str) -> str:
        """Run ``cubroker`` inside, with patience for a broker that starts, and return what it prints."""
        return self.lab.run("cubroker", "--timeout", f"{PATIENCE:g}", *arguments).stdout

    def pools(self) -> list[dict[str, Any]]:
        """Return what ``cubroker ls`` lists."""
        listed: list[dict[str, Any]] = json.loads(self.cubroker("ls", "--json"))
        return listed

    def publish(self, name: str) -> int:
        """Publish a durable version, and return its number."""
        with Client(self.lab, "publish", name) as publisher:
            return int(publisher.said)

    def memory(self) -> int:
        """Count the pieces of devices' memory that the broker has open, however often each."""
        return len(set(self.lab.run("sh", "-c", MEMORY, "sh", str(self.pid)).stdout.split()))
