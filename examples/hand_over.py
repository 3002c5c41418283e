"""One process hands results to another, again and again, in memory that both may write, without a copy.

cubroker serve --devices host:1 &
python examples/hand_over.py produce &
python examples/hand_over.py consume

Two events keep them apart: the producer records `full`, the consumer, when it has read, `empty`. On a GPU both would
pass their streams to `record` and `wait`, and never wait for the device themselves.
"""

from __future__ import annotations

import sys

import numpy as np

from cubroker import Broker, Layout, Unavailable

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
    with (
        Broker() as broker,
        broker.attach(NAME, wait=60) as pool,
        pool.event("empty") as empty,
        pool.open_event("full", wait=60) as full,
    ):
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
