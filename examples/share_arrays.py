"""Arrays in memory that the broker owns: one process fills them, others read them without a copy.

cubroker serve --devices host:1 &
python examples/share_arrays.py write
python examples/share_arrays.py read       # in as many processes as you like
"""

from __future__ import annotations

import sys

import numpy as np

from cubroker import Broker, Layout

NAME = "examples/arrays"


def write() -> None:
    layout = Layout.pack([("primes", "I64", (5,)), ("noise", "F32", (1024, 1024))])
    noise = np.random.default_rng().standard_normal((1024, 1024), dtype=np.float32)
    with Broker() as broker, broker.create(NAME, layout) as draft:
        draft["primes"].copy_from(np.array([2, 3, 5, 7, 11]))
        draft["noise"].copy_from(noise)
        print(f"published version {draft.seal()} of {NAME}; its noise sums up to {noise.sum():.3f}")


def read() -> None:
    with Broker() as broker, broker.attach(NAME, wait=60) as pool:
        primes, noise = pool["primes"].numpy(), pool["noise"].numpy()
        print(f"{pool.name}@{pool.version}: primes {primes.tolist()}, noise that sums up to {noise.sum():.3f}")


if __name__ == "__main__":
    work = {"write": write, "read": read}.get(" ".join(sys.argv[1:]))
    if work is None:
        sys.exit(__doc__)
    work()
