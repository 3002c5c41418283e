"""Broker processes with a configuration file."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

from tests.brokers import BrokerProcess, started


class Configured(BrokerProcess):
    """A broker with a configuration file."""

    def __init__(self, directory: Path, text: str) -> None:
        directory.parent.chmod(0o755)
        self.file = directory.with_name("cubroker.toml")
        self.file.write_text(text)
        super().__init__(directory)

    def command(self) -> list[str]:
        return [*super().command(), "--config", str(self.file)]

    def reload(self, text: str) -> None:
        """Change the file, and have it read again."""
        self.file.write_text(text)
        self.process.send_signal(signal.SIGHUP)


def configured(text: str, kind: type[Configured] = Configured) -> AbstractContextManager[Configured]:
    return started(lambda directory: kind(directory, text))
