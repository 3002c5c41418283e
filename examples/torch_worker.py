"""A worker whose torch tensors are the pool's memory, on a GPU or on a host device.

cubroker load NAME PATH...
python examples/torch_worker.py NAME
"""

from __future__ import annotations

import sys
from time import perf_counter

from cubroker import Broker
from cubroker.integrations.torch import state_dict


def main(name: str) -> None:
    with Broker() as broker:
        began = perf_counter()
        with broker.attach(name, wait=60) as pool:
            state = state_dict(pool)
        # The tensors keep the memory mapped and leased while they live, even if the pool is closed.
        took = perf_counter() - began
        print(f"{name}@{pool.version}: {len(state)} tensors attached in {took * 1000:.1f} ms")
        for tensor, value in list(state.items())[:3]:
            print(f"  {tensor}: {value.dtype} {tuple(value.shape)} at {value.data_ptr():#x}")
        del state, value  # the lease ends with the last tensor, the session with this block


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
