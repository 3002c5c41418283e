"""A worker that embeds with shared weights: ``python -m tests.unit.integrations.embed_process DIRECTORY NAME MODEL``.

It prints the embeddings of :data:`SENTENCES`, as hexadecimal bytes, and waits for its input to end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from cubroker.client import Broker
from cubroker.integrations.transformers import attach_model

SENTENCES = ["weights are loaded once", "every worker attaches to them, without a copy", "seven", ""]


def embed(model: Any, folder: Path) -> torch.Tensor:
    """Return one vector per sentence: the mean over its tokens, as sentence-transformers takes it."""
    torch.set_num_threads(1)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean: torch.Tensor = (hidden * mask).sum(1) / mask.sum(1)
    return mean


def meta_model(folder: Path) -> Any:
    """Return the model without memory."""
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))


def main(directory: str, name: str, model: str) -> None:
    folder = Path(model)
    with Broker(directory) as broker, broker.attach(name) as pool:
        print(embed(attach_model(meta_model(folder), pool), folder).numpy().tobytes().hex(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
