"""A worker that runs a model of the transformers library on weights that it did not load.

cubroker load NAME FOLDER
python examples/transformers_worker.py NAME FOLDER "a text" ...

FOLDER is a model's: this reads its config and tokenizer, and not its weights. Pools on several devices
need ``device=`` in ``from_pool``.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModel

from cubroker import Broker
from cubroker.integrations.transformers import from_pool


def main(name: str, folder: str, *texts: str) -> None:
    with Broker() as broker:
        model, tokenizer = from_pool(name, folder, auto=AutoModel, broker=broker, wait=60)
        tokens = tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens.to(model.device)).last_hidden_state
        for text, vectors in zip(texts, hidden, strict=True):
            print(f"{text!r}: {vectors[0, :4].tolist()} …")
        del model  # the lease ends with the model, the session with this block


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
