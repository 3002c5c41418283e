"""A process that uses a pool on a GPU: ``python -m tests.gpu.worker DIRECTORY WHAT NAME [MODEL]``.

It prints one line, then holds the pool until its input ends. ``WHAT``: ``digest`` prints the SHA-256 of every tensor's
bytes, read by the driver; ``torch`` the same, read by torch; ``generate`` the tokens that a model generates.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from cubroker.client import Broker, Pool


def digests(pool: Pool) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in pool.items()}


def torch_digests(pool: Pool) -> dict[str, str]:
    import torch

    from cubroker.client.torch import state_dict

    def raw(tensor: torch.Tensor) -> bytes:
        assert tensor.is_cuda
        return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""

    return {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in state_dict(pool).items()}


def generated(model: Any) -> list[list[int]]:
    """Return what a model makes of two prompts, always taking the likeliest token."""
    import torch

    prompts = torch.arange(1, 17, device=model.device).reshape(2, 8)
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False)
    found: list[list[int]] = tokens.tolist()
    return found


def generate(pool: Pool, folder: str) -> list[list[int]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cubroker.client.transformers import attach_model

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return generated(attach_model(model, pool))


def main(directory: str, what: str, name: str, *model: str) -> None:
    uses = {"digest": digests, "torch": torch_digests, "generate": generate}
    with Broker(directory) as broker, broker.attach(name) as pool:
        print(json.dumps(uses[what](pool, *model)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
