"""Users of one host, and a broker that has a user of its own without any power over them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.hostile.test_keep import child
from tests.unit.cli.processes import COMMAND, environment, run
from tests.unit.server.configured import Configured
from tests.unit.server.processes import gateway_of
from tests.unit.server.visitor import Visitor, visiting

NEEDS = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, of util-linux"),
    pytest.mark.slow,
]

BROKER, ALICE, BOB, CAROL, POD, EVE = range(4900, 4906)
"""Users, each with a group of the same number."""

CLIENTS = 4910
"""A group that may connect."""

READS = "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"
"""What lets another user start a Python that lies in root's own folder, and nothing that matters here."""


def become(uid: int, *groups: int) -> tuple[str, ...]:
    """Return what, before a command, runs it as a user, in the user's own group and in others."""
    others = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", others, *READS, "--no-new-privs")


class Unprivileged(Configured):
    """A broker as the shipped unit runs it: of its own user, without any power over other users."""

    def __init__(self, directory: Path, text: str) -> None:
        directory.mkdir()
        os.chown(directory, BROKER, BROKER)
        directory.chmod(0o755)
        super().__init__(directory, text)

    def command(self) -> list[str]:
        return [*become(BROKER, CLIENTS), *super().command()]


class KeptUnprivileged(Unprivileged):
    """The same under a keeper, which has the same user."""

    def command(self) -> list[str]:
        whole, broker = super().command(), Configured.command(self)
        return [*whole[: -len(broker)], *COMMAND, "keep", "--", *broker]

    @property
    def processes(self) -> dict[str, int]:
        """The keeper, its broker and that one's gateway, by what they are."""
        broker = child(self.pid)
        return {"keeper": self.pid, "broker": broker, "gateway": gateway_of(broker)}


def cubroker(directory: Path, uid: int, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``cubroker`` to its end, as a user who may connect."""
    variables["CUBROKER_DIR"] = str(directory)
    return run(*arguments, env=environment(**variables), before=become(uid, CLIENTS))


@contextmanager
def containing(directory: Path, uid: int, *groups: int) -> Iterator[Visitor]:
    """A client in a container of a user's own, where it is root; the test is skipped where users may make none."""
    probe = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "unshare", "--user", "--map-root-user"]
    probe += ["--pid", "--fork", "--mount", "--net", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"users may make no namespaces here: {done.stderr.strip()}")
    one_thread = ("env", "OPENBLAS_NUM_THREADS=1")  # which alone may go into another user namespace
    with visiting(
        directory, uid, uid, *groups, before=one_thread, module="tests.integration.hostile.container"
    ) as visitor:
        yield visitor
