"""A broker under systemd that is killed at any moment, and replaced by another version, while workers work.

``CUBROKER_SYSTEMD_KILLS`` says how often; ``make systemd-test`` does it a hundred times.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.brokers import eventually
from tests.systemd.clients import Client
from tests.systemd.installing import VERSIONS, add, switch
from tests.systemd.service import EITHER, SERVICE, Service
from tests.wheels import wheel

KILLS = int(os.environ.get("CUBROKER_SYSTEMD_KILLS", "4"))
HOLDERS = 4
BUSY = ("attaching", "attaching", "publishing")

pytestmark = pytest.mark.slow


class Company(NamedTuple):
    """Processes that use the broker: of two pools one is held and attached to, and one gets new versions."""

    holders: Sequence[Client]
    busy: Sequence[Client]
    observer: Client

    @classmethod
    @contextmanager
    def at_work(cls, service: Service) -> Iterator[Company]:
        service.publish("held")
        with ExitStack() as stack:
            holders = [stack.enter_context(Client(service.lab, "hold", "held")) for _ in range(HOLDERS)]
            busy = [stack.enter_context(Client(service.lab, role, role_pool(role))) for role in BUSY]
            pids = [client.said for client in (*holders, *busy)]
            yield cls(holders, busy, stack.enter_context(Client(service.lab, "observer", *pids)))

    def settle(self, service: Service) -> list[tuple[float, float]]:
        """Stop the busy ones; nothing is lost, doubled or leaked. Return when their long turns began and ended."""
        told = [client.ask() for client in self.busy]
        assert all(turns for turns, _ in told)
        assert all(holder.ask() == ["held", 1] for holder in self.holders)
        found, leases = self.observer.ask()
        assert found == []
        assert leases.pop("held@1") == HOLDERS
        assert list(leases.values()) == [0]  # the newest version of the other pool, and no other
        sessions, allocations = len(self.holders) + len(self.busy) + 1, 2 * 2
        stored = len({"ledger"}) + 2 * sessions + allocations
        eventually(lambda: service.stored == stored, f"systemd to have {stored} descriptors")
        eventually(lambda: service.memory() == allocations, f"the broker to have {allocations} pieces of memory")
        return [tuple(turn) for _, long in told for turn in long]


def role_pool(role: str) -> str:
    return "held" if role == "attaching" else "published"


def stalls(kills: Sequence[tuple[float, float]], turns: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of the longest turn that each kill fell into, in order of length.

    A kill came somewhere between the two moments that are known of it: systemd takes longer to send it than a turn.
    """
    return sorted(
        max((end - began for began, end in turns if began <= after and before <= end), default=0.0)
        for before, after in kills
    )


@EITHER
@pytest.mark.timeout(1800)
def test_kills_at_any_moment_lose_and_double_nothing(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(7)
    kills: list[tuple[float, float]] = []
    if service.kept:
        service.stand_by("--pause", "0")
        service.lab.systemctl("restart", SERVICE)
    with Company.at_work(service) as company:
        for number in range(KILLS):
            time.sleep(chance.uniform(0, 0.4))  # any moment
            before = time.monotonic()
            if victim := service.main if number % 3 == 1 else service.pid:  # the keeper, if there is one, or the broker
                service.lab.run("kill", "-KILL", str(victim), check=False)
            kills.append((before, time.monotonic()))
            if number % 4:  # the others hit the next broker while it comes up
                service.serves()
        service.serves()
        turns = company.settle(service)
    assert service.starts_again
    lengths = stalls(kills, turns)
    with capsys.disabled():
        p50, p95 = (lengths[int(len(lengths) * share)] for share in (0.5, 0.95))
        what = f"{KILLS} SIGKILLs under {'systemd, with a broker that stands by' if service.kept else 'systemd'}"
        print(f"\n{what}: stalls p50 {p50:.2f} s, p95 {p95:.2f} s, at most {lengths[-1]:.2f} s")


@EITHER
def test_another_version_goes_on_where_the_last_one_stopped(service: Service, tmp_path: Path) -> None:
    old, new = VERSIONS
    add(service.lab, new, wheel(tmp_path, new))
    with Company.at_work(service) as company:
        assert service.version == old
        switch(service.lab, new)
        service.lab.systemctl("restart", SERVICE)
        try:
            assert service.version == new
            company.settle(service)
        finally:
            switch(service.lab, old)
