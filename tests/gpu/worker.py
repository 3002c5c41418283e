"""A process that uses a pool on a GPU: ``python -m tests.gpu.worker DIRECTORY ATTACH``.

``ATTACH`` are the arguments of :meth:`Broker.attach`, in JSON. It then does what each line of its input says, a
method of :class:`User` and its arguments in JSON, and prints what that returned, or ``{"error": …}``. It holds the
pool until its input ends.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from cubroker.client import Broker, Pool
from cubroker.protocol import CubrokerError


class User:
    """A pool, and what tests want done with it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.graph: Any = None
        self.seen: Any = None

    def digest(self) -> dict[str, str]:
        """The SHA-256 of every tensor's bytes, read by the driver."""
        return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in self.pool.items()}

    def torch(self) -> dict[str, str]:
        """The SHA-256 of every tensor's bytes, read by torch."""
        return {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in self.state().items()}

    def computed(self) -> dict[str, str]:
        """The SHA-256 of every tensor's bytes, read by a kernel that runs on the device that uses them."""
        import torch

        def through(tensor: torch.Tensor) -> bytes:
            assert tensor.device.index == self.pool.device.index
            flat = tensor.reshape(-1).view(torch.uint8)
            return raw(flat ^ torch.full_like(flat, 0)) if flat.numel() else b""

        state = self.state()
        return {name: hashlib.sha256(through(tensor)).hexdigest() for name, tensor in state.items()}

    def generate(self, folder: str) -> list[list[int]]:
        """The tokens that a model in the folder, with the pool's weights, generates."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from cubroker.integrations.transformers import attach_model

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return generated(attach_model(model, self.pool))

    def capture(self, name: str) -> str:
        """Capture a graph whose kernel reads a tensor, without running it; returns its kind."""
        import torch

        weights = self.state()[name].reshape(-1).view(torch.uint8)
        self.seen = torch.zeros_like(weights)
        torch.bitwise_xor(self.seen, 0, out=self.seen)  # kernels are loaded before, not while, a graph is captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.bitwise_xor(weights, 0, out=self.seen)
        return type(self.graph).__name__

    def replay(self) -> str:
        """Replay it on an empty output; the SHA-256 of what its kernel saw."""
        import torch

        self.seen.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return hashlib.sha256(raw(self.seen)).hexdigest()

    def sleep(self) -> bool:
        self.pool.sleep()
        return self.pool.asleep

    def wake(self) -> bool:
        self.pool.wake()
        return self.pool.asleep

    def scribble(self, name: str) -> str:
        """Let a kernel of torch write to a tensor."""
        import torch

        tensor = self.state()[name]
        tensor.reshape(-1).view(torch.uint8).fill_(0x5A)
        torch.cuda.synchronize(tensor.device)  # the current device may be another one
        return "nobody minded"

    def state(self) -> dict[str, Any]:
        from cubroker.integrations.torch import state_dict

        return state_dict(self.pool)


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor on a GPU, read by torch."""
    import torch

    assert tensor.is_cuda
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def generated(model: Any) -> list[list[int]]:
    """Return what a model makes of two prompts, always taking the likeliest token."""
    import torch

    prompts = torch.arange(1, 17, device=model.device).reshape(2, 8)
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False)
    found: list[list[int]] = tokens.tolist()
    return found


def main(directory: str, attach: str) -> None:
    with Broker(directory) as broker, broker.attach(**json.loads(attach)) as pool:
        user = User(pool)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            try:
                answer = getattr(user, what)(*arguments)
            except (CubrokerError, RuntimeError) as error:  # torch's errors of the device are RuntimeErrors
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
