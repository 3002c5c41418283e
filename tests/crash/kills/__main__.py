"""Kill workers at every point and at any moment: ``python -m tests.crash.kills --kills 1000 --seed 7``.

Several at a time are as many processes, each with its ``--part`` of the points: ``--part 1/4`` has every fourth one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from math import inf

from tests.crash import end_in_order
from tests.crash.kills.campaign import Campaign
from tests.crash.kills.kill_points import POINTS, Point
from tests.unit.server.processes import descriptors, gateway_of, resident

BATCH = 50
"""Kills at any moment between two looks at whether everything was given back."""


def main() -> int:
    """Return 0; what is found ends it with a traceback, after the seed and the point."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="half of them at points, half at any moment")
    parser.add_argument("--seed", type=int, default=0, help="of the order of points, and of the moments")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="K/N", help="only every N-th point from the K-th on"
    )
    parser.add_argument("--seconds", type=float, default=inf, help="begin no kill after so long")
    options = parser.parse_args()
    end_in_order()
    first, step = options.part
    points = POINTS[first - 1 :: step]
    chance = random.Random(options.seed)
    with Campaign.begin() as campaign:
        end = time.monotonic() + options.seconds
        at_points(campaign, points, len(points), chance, end)  # whatever is opened once and kept is open afterwards
        before = holdings(campaign)
        at_points(campaign, points, options.kills // 2, chance, end)
        at_any_moment(campaign, options.kills - campaign.kills, chance, end)
        after = holdings(campaign)
        report(campaign, len(points), options.seed)
        print(f"descriptors of broker and gateway: {before[:2]} before, {after[:2]} after")
        print(f"resident KiB of broker and gateway: {before[2:]} before, {after[2:]} after")
        return int(before[:2] != after[:2])


def part(text: str) -> tuple[int, int]:
    """Read which of how many parts this is."""
    first, step = map(int, text.split("/"))
    if not 1 <= first <= step:
        raise ValueError
    return first, step


def at_points(campaign: Campaign, points: Sequence[Point], until: int, chance: random.Random, end: float) -> None:
    """Kill at points, each as often as any other, until there were so many kills, or that moment has come."""
    began = time.monotonic()
    while campaign.kills < until and time.monotonic() < end:
        for point in chance.sample(points, min(len(points), until - campaign.kills)):
            if time.monotonic() >= end:
                break
            try:
                campaign.kill_at(point)
            except BaseException:
                print(f"kill {campaign.kills}, at {point}", file=sys.stderr)
                raise
        print(f"{campaign.kills} kills, {time.monotonic() - began:.0f} s", file=sys.stderr)


def at_any_moment(campaign: Campaign, count: int, chance: random.Random, end: float) -> None:
    """Kill at random moments, in batches."""
    last = campaign.kills + count
    while campaign.kills < last and time.monotonic() < end:
        campaign.kill_at_any_moment(min(BATCH, last - campaign.kills), chance)
        print(f"{campaign.kills} kills", file=sys.stderr)


def holdings(campaign: Campaign) -> tuple[int, int, int, int]:
    """Return the descriptors and the resident KiB of broker and gateway."""
    pids = campaign.process.pid, gateway_of(campaign.process.pid)
    files, memory = [descriptors(pid) for pid in pids], [resident(pid) >> 10 for pid in pids]
    return files[0], files[1], memory[0], memory[1]


def report(campaign: Campaign, points: int, seed: int) -> None:
    """Say how long leases outlived their holders."""
    delays = sorted(campaign.delays)
    print(f"{campaign.kills} kills at {points} points and at any moment, seed {seed}: nothing found")
    if not delays:
        return
    p50, p99 = (1e3 * delays[int(len(delays) * share)] for share in (0.5, 0.99))
    print(
        f"from the kill to the end of the leases, {len(delays)} holders:"
        f" p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {1e3 * delays[-1]:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
