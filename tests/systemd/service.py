"""The broker's service inside a lab, as a test has it."""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.brokers import PATIENCE, eventually
from tests.systemd.clients import Client
from tests.systemd.lab import Lab

SERVICE = "cubroker.service"
SOCKETS = ("cubroker.socket", "cubroker-requests.socket")
SETTINGS = "/etc/cubroker/cubroker.toml"
TEXT = 'devices = "host:2@64MiB"\n'
DROP_IN = "/run/systemd/system/cubroker.service.d/test.conf"

MEMORY = """
for file in /proc/$1/fd/*; do
  case "$(readlink "$file")" in /memfd:cubroker-device*) stat --dereference --format=%i "$file" ;; esac
done
"""
"""Prints the inodes of devices' memory that process $1 has open."""


class Service:
    """``cubroker.service`` and its sockets."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @property
    def pid(self) -> int:
        """The broker's process id inside the lab; 0 while there is none."""
        return int(self.lab.show(SERVICE, "MainPID"))

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
        before = self.starts_again
        self.signal(signal.SIGKILL)
        eventually(lambda: self.starts_again > before, "systemd to start the broker again")
        self.serves()

    def serves(self) -> None:
        """Return when the broker has said that it serves."""
        eventually(lambda: self.lab.show(SERVICE, "ActiveState") == "active", "the broker to serve")

    def configure(self, unit: str) -> None:
        """Have the next start use these lines of a unit as well; none of them if they are empty."""
        self.lab.write(DROP_IN, unit)
        self.lab.systemctl("daemon-reload")

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
