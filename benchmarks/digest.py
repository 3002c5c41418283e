"""Rate of a device's digest, in GB/s, compared with a copy of the same bytes within the device.

Digest and copy alternate in one process with ``Pool.check()``, which also asks the broker for the digest to compare.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import SHARES, beside_broker, one_allocation, run_alone, seconds
from benchmarks.options import Plan
from benchmarks.report import Figure, rate, ratio
from cubroker.client import Broker

POOL = "weights"
ROUNDS = 7
PIECE = 1 << 20


def measure(plan: Plan) -> list[Figure]:
    figures: list[Figure] = []
    for share in SHARES:
        copied, digested, checked = beside_broker(plan.devices, take_turns, share, plan.nbytes)
        what = f"one allocation of {plan.nbytes / 1e9:g} GB"
        figures += [
            rate(f"{share}: copy within the device", plan.nbytes, copied, what),
            rate(f"{share}: digest of the same bytes", plan.nbytes, digested, what),
            ratio(f"{share}: digest ÷ copy", copied, digested, "of each pair of rounds"),
            rate(f"{share}: check()", plan.nbytes, checked, what),
        ]
    return figures


def take_turns(connection: Connection, directory: Path, share: str, nbytes: int) -> None:
    """In a child: send the seconds of each copy, each digest and each check."""
    with Broker(directory) as broker:
        with broker.create(POOL, one_allocation(nbytes), share=share) as draft:
            for start in range(0, nbytes, PIECE):  # no two pieces are alike, as in weights
                text = b"%016d" % start
                draft.context.write(draft["x"].pointer + start, text[: nbytes - start])
            draft.seal(digest=True)
        with broker.attach(POOL) as pool, pool.context.stream() as stream:
            source, target = pool["x"].pointer, pool.context.allocate(nbytes)

            def copy() -> None:
                stream.copy(target, source, nbytes)
                stream.synchronize()

            digest = partial(pool.context.digests, [(source, nbytes)])
            times = [(seconds(copy), seconds(digest), seconds(pool.check)) for _ in range(1 + ROUNDS)][1:]
            if pool.context.digests([(target, nbytes)]) != digest():
                raise RuntimeError("a copy has another digest than what it was made of")
            pool.context.free(target)
    connection.send(tuple(zip(*times, strict=True)))


if __name__ == "__main__":
    run_alone(measure)
