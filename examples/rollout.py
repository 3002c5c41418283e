"""A rollout worker whose model goes from version to version in place, while examples/trainer.py trains.

python examples/rollout.py WORKER        # any name; as many workers as you like, before the trainer or later

The model is made once, and its parameters are the pool's memory. Each batch is checked against the trainer's own output
for the version that the worker believes to use. It ends with the trainer's last version.
"""

from __future__ import annotations

import sys
from itertools import chain

import torch

from cubroker import Broker
from cubroker.integrations.torch import state_dict

NAME = "examples/policy"
BATCHES = 50


def main(worker: str) -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):  # no memory and no initialisation: the weights come from the pool
        policy = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    with Broker() as broker, broker.attach(NAME, wait=600) as pool:
        weights = state_dict(pool)
        seen, expected, left = (weights.pop(f"probe.{name}") for name in ("input", "output", "left"))
        policy.load_state_dict(weights, assign=True)  # the pool's tensors become the parameters
        addresses = [parameter.data_ptr() for parameter in policy.parameters()]
        used = 0
        for version in chain([pool.version], pool.follow(switch=True, timeout=600)):
            for _ in range(BATCHES):
                check(policy, seen, expected, f"{worker}: version {version}")
            used += 1
            print(f"{worker}: version {version}, {BATCHES} batches as the trainer's", flush=True)
            if not left:
                break
        assert addresses == [parameter.data_ptr() for parameter in policy.parameters()]
        print(f"{worker}: {used} versions, one model, the same addresses")
        del policy, weights, seen, expected, left  # the lease ends with the last tensor


@torch.inference_mode()
def check(policy: torch.nn.Module, seen: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    """Run a batch whose first rows are the probe, and check their outputs."""
    outputs = policy(torch.cat([seen, torch.randn(64, 64, device=seen.device)]))
    if not torch.allclose(outputs[: len(seen)], expected, rtol=1e-4, atol=1e-4):
        sys.exit(f"{label}: the outputs are not the trainer's; weights of another version were used")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
