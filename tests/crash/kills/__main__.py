"""Kill workers at every point and at any moment: ``python -m tests.crash.kills --kills 1000 --seed 7``."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.crash.kills.campaign import Campaign
from tests.crash.kills.kill_points import POINTS
from tests.unit.server.processes import descriptors, gateway_of, resident

BATCH = 50
"""Kills at any moment between two looks at whether everything was given back."""


def main() -> int:
    """Return 0; what is found ends it with a traceback, after the seed and the point."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="half of them at points, half at any moment")
    parser.add_argument("--seed", type=int, default=0, help="of the order of points, and of the moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with Campaign.begin() as campaign:
        at_points(campaign, len(POINTS), chance)  # whatever is opened once and kept is open afterwards
        before = holdings(campaign)
        at_points(campaign, options.kills // 2, chance)
        at_any_moment(campaign, options.kills - campaign.kills, chance)
        after = holdings(campaign)
        report(campaign, options.seed)
        print(f"descriptors of broker and gateway: {before[:2]} before, {after[:2]} after")
        print(f"resident KiB of broker and gateway: {before[2:]} before, {after[2:]} after")
        return int(before[:2] != after[:2])


def at_points(campaign: Campaign, until: int, chance: random.Random) -> None:
    """Kill at points, each as often as any other, until there were so many kills."""
    began = time.monotonic()
    while campaign.kills < until:
        for point in chance.sample(POINTS, min(len(POINTS), until - campaign.kills)):
            try:
                campaign.kill_at(point)
            except BaseException:
                print(f"kill {campaign.kills}, at {point}", file=sys.stderr)
                raise
        print(f"{campaign.kills} kills, {time.monotonic() - began:.0f} s", file=sys.stderr)


def at_any_moment(campaign: Campaign, count: int, chance: random.Random) -> None:
    """Kill at random moments, in batches."""
    last = campaign.kills + count
    while campaign.kills < last:
        campaign.kill_at_any_moment(min(BATCH, last - campaign.kills), chance)
        print(f"{campaign.kills} kills", file=sys.stderr)


def holdings(campaign: Campaign) -> tuple[int, int, int, int]:
    """Return the descriptors and the resident KiB of broker and gateway."""
    pids = campaign.process.pid, gateway_of(campaign.process.pid)
    files, memory = [descriptors(pid) for pid in pids], [resident(pid) >> 10 for pid in pids]
    return files[0], files[1], memory[0], memory[1]


def report(campaign: Campaign, seed: int) -> None:
    """Say how long leases outlived their holders."""
    delays = sorted(campaign.delays)
    p50, p99 = (1e3 * delays[int(len(delays) * share)] for share in (0.5, 0.99))
    print(f"{campaign.kills} kills at {len(POINTS)} points and at any moment, seed {seed}: nothing found")
    print(
        f"from the kill to the end of the leases, {len(delays)} holders:"
        f" p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {1e3 * delays[-1]:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
