"""One process hands results to another, again and again, in memory that both may write, without a copy.

cubroker serve --devices host:1 &
python examples/hand_over.py produce &
python examples/hand_over.py consume

Two events keep them apart: the producer records `full`, the consumer, when it has read, `empty`. On a GPU both would
pass their streams to `record` and `wait`, and never wait for the device themselves.

A producer that is killed leaves its pool, but its event ends with it: a consumer that finds no event waits for the pool
of the next producer.
"""

from __future__ import annotations

import sys

import numpy as np

from cubroker import Broker, Layout, Pool, TimedOut, Unavailable
from cubroker.client import SharedEvent

NAME = "examples/scratch"
ROUNDS = 5


def produce() -> None:
    layout = Layout.pack([("activations", "F32", (1024, 256))])
    with Broker() as broker:
        with broker.create(NAME, layout, writable=True) as draft:
            draft.seal()
        with broker.attach(NAME) as pool, pool.event("full") as full, pool.open_event("empty", wait=60) as empty:
            for number in range(1, ROUNDS + 1):
                pool["activations"].copy_from(np.full((1024, 256), number, np.float32))
                full.record()
                empty.wait()  # raises Unavailable if the process that made the event ends
        broker.retire(NAME)


def consume() -> None:
    with Broker() as broker, broker.follow(NAME, timeout=60) as versions:
        for _ in versions:
            with broker.attach(NAME) as pool, pool.event("empty") as empty:
                try:
                    full = pool.open_event("full", wait=5)
                except TimedOut:
                    print(f"{NAME}@{pool.version} has no producer", flush=True)
                    continue
                with full:
                    read(pool, full, empty)
                break


def read(pool: Pool, full: SharedEvent, empty: SharedEvent) -> None:
    while True:
        try:
            generation = full.wait()
        except Unavailable as error:  # the producer is done, or dead
            print(error)
            break
        activations = np.frombuffer(pool["activations"].tobytes(), np.float32)
        print(f"generation {generation}: mean {activations.mean():.1f}", flush=True)
        empty.record()


if __name__ == "__main__":
    work = {"produce": produce, "consume": consume}.get(" ".join(sys.argv[1:]))
    if work is None:
        sys.exit(__doc__)
    work()
