"""A trainer whose weights rollout workers use while it trains: each round is published as the next version of a pool.

cubroker serve --devices host:1 &    # with a GPU: cubroker serve &
python examples/rollout.py a &
python examples/rollout.py b &
python examples/trainer.py 20        # so many versions

With each version it publishes a probe, an input and its own output for that, so that a worker can tell whether the
weights that it uses are this version's, all of them and no others.
"""

from __future__ import annotations

import sys

import torch

from cubroker import Broker

NAME = "examples/policy"
STEPS = 50


def main(versions: int) -> None:
    torch.set_num_threads(1)  # the model is small, and the workers compute at the same time
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    most = 0
    with Broker() as broker:
        for number in range(1, versions + 1):
            for _ in range(STEPS):
                seen = torch.randn(256, 64, device=device)
                loss = (policy(seen) - torch.sin(seen[:, :8] + number)).square().mean()  # another target in each round
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            broker.wait_ended(NAME)  # readers hold the current version alone: with the next one there are two
            version = broker.publish(NAME, policy.state_dict() | probe(policy, device, versions - number), wait=60)
            held = [pool for pool in broker.pools() if pool.name == NAME]
            most = max(most, len(held))
            print(f"version {version}: loss {loss.item():.3f}, {len(held)} held", flush=True)
        broker.wait_ended(NAME)
        for pool in broker.pools():
            if pool.name == NAME:
                print(f"{pool.name}@{pool.version} is {pool.state}; versions held at a time: {most} at most")
        broker.retire(NAME)  # workers keep it until they end; a worker that starts now waits for another trainer


def probe(policy: torch.nn.Module, device: str, left: int) -> dict[str, torch.Tensor]:
    """Return what a worker checks its outputs with, and how many versions are still to come."""
    seen = torch.randn(4, 64, device=device)
    with torch.no_grad():
        return {"probe.input": seen, "probe.output": policy(seen), "probe.left": torch.tensor(left, device=device)}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(int(sys.argv[1]))
