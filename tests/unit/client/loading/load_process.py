"""A process that loads: ``python -m tests.unit.client.loading.load_process DIRECTORY NAME PATH HOW``.

It says ``asking``, loads, and prints what came of it as JSON. ``HOW`` is ``if-absent``, or ``hold``: then it says
``copying`` when some bytes are there, and goes on when a line comes in.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from cubroker.client import Broker
from cubroker.client.loading.loader import load


def hold(done: int, total: int) -> None:
    print("copying", flush=True)
    sys.stdin.readline()


def main(directory: str, name: str, path: str, how: str) -> None:
    with Broker(directory) as broker:
        print("asking", flush=True)
        try:
            loaded = load(broker, name, path, if_absent=True, wait=60, progress=hold if how == "hold" else None)
            print(json.dumps(asdict(loaded)), flush=True)
        except KeyboardInterrupt:
            print(json.dumps({"interrupted": len(broker.pools())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
