"""How fast a device computes the digest of what it holds, beside a copy of the same bytes within the device.

Both take turns in one process, and so does ``Pool.check()``, which asks the broker for the digest to compare with.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import alone
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import SHARES, Child, serving
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "weights"
ROUNDS = 7
PIECE = 1 << 20


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    figures: list[Figure] = []
    for share in SHARES:
        with serving(plan.devices) as stage, Child(take_turns, stage.directory, share, plan.nbytes) as child:
            times = child.answer()
        copied, digested, checked = ([plan.nbytes / seconds / 1e9 for seconds in each] for each in times)
        what = f"one allocation of {plan.nbytes / 1e9:g} GB"
        ratios = [b / a for a, b in zip(copied, digested, strict=True)]
        figures += [
            median(f"{share}: copy within the device", copied, "GB/s", what),
            median(f"{share}: digest of the same bytes", digested, "GB/s", what),
            median(f"{share}: digest ÷ copy", ratios, "", "of each pair of rounds"),
            median(f"{share}: check()", checked, "GB/s", what),
        ]
    return figures


def take_turns(connection: Connection, directory: Path, share: str, nbytes: int) -> None:
    """In a child: answer with the seconds of each copy, of each digest and of each check."""
    with Broker(directory) as broker:
        with broker.create(POOL, Layout.pack([("x", "U8", (nbytes,))]), share=share) as draft:
            for start in range(0, nbytes, PIECE):  # no two pieces are alike, as in weights
                text = b"%016d" % start
                draft.context.write(draft["x"].pointer + start, text[: nbytes - start])
            draft.seal(digest=True)
        with broker.attach(POOL) as pool, pool.context.stream() as stream:
            source, target = pool["x"].pointer, pool.context.allocate(nbytes)

            def copy() -> float:
                began = perf_counter()
                stream.copy(target, source, nbytes)
                stream.synchronize()
                return perf_counter() - began

            def digest() -> float:
                began = perf_counter()
                pool.context.digests([(source, nbytes)])
                return perf_counter() - began

            def check() -> float:
                began = perf_counter()
                pool.check()
                return perf_counter() - began

            times = [(copy(), digest(), check()) for _ in range(1 + ROUNDS)][1:]
            if pool.context.digests([(target, nbytes)]) != pool.context.digests([(source, nbytes)]):
                raise RuntimeError("a copy has another digest than what it was made of")
            pool.context.free(target)
    connection.send(tuple(zip(*times, strict=True)))


if __name__ == "__main__":
    alone.main(measure)
