"""Kill the broker at every step of every scene, and of its start: ``python -m tests.crash.restart``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from math import inf

from tests.crash import end_in_order
from tests.crash.restart.step_campaign import SCENES, Campaign

SPARE = 3
"""Steps in a row that a scene did not come to, after which it has no more: how many it takes varies a little."""


def main() -> int:
    """Return 0; what is found ends it with a traceback, after the scene and the step."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.restart", description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th step")
    parser.add_argument(
        "--first", type=int, default=0, metavar="K", help="the first step; by default one of the first N"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first step of each scene")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no kill after so long")
    parser.add_argument("--scenes", default="", metavar="WORD", help="only scenes that have this in their name")
    options = parser.parse_args()
    end_in_order()
    chance = random.Random(options.seed)
    plays: dict[str, Callable[[Campaign, int], bool]] = {"start": Campaign.kill_restoring}
    for scene in SCENES:
        plays[str(scene)] = lambda campaign, step, scene=scene: campaign.kill_at(scene, step)  # type: ignore[misc]
    with Campaign.begin() as campaign:
        began = time.monotonic()
        end = began + options.seconds
        for name, kill_at in plays.items():
            if options.scenes in name:
                before = campaign.kills.total()
                first = options.first or chance.randrange(1, options.every + 1)
                at_every_step(campaign, name, kill_at, range(first, sys.maxsize, options.every), end)
                kills = campaign.kills.total() - before
                print(f"{name}: {kills} kills, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for label, count in sorted(campaign.kills.items()):
            print(f"{count:6} at {label}")
        print(f"{campaign.kills.total()} kills at {len(campaign.kills)} kinds of steps: nothing found")
    return 0


def at_every_step(
    campaign: Campaign, name: str, kill_at: Callable[[Campaign, int], bool], steps: Iterable[int], end: float
) -> None:
    """Kill at one step after the other until there are no more, or that moment has come."""
    misses = 0
    for step in steps:
        if misses == SPARE or time.monotonic() >= end:
            return
        try:
            misses = 0 if kill_at(campaign, step) else misses + 1
        except BaseException:
            print(f"{name}, step {step}; the broker wrote:\n{campaign.supervised.log()[-5000:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    sys.exit(main())
