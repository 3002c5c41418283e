"""A worker that runs a model of the transformers library on weights that it did not load.

cubroker load NAME FOLDER
python examples/transformers_worker.py NAME FOLDER "a text" ...

FOLDER is a model's: this reads its config and tokenizer, and not its weights. Pools on several devices
need ``device=`` in ``attach``.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from cubroker import Broker
from cubroker.integrations.transformers import attach_model


def main(name: str, folder: str, *texts: str) -> None:
    with torch.device("meta"):  # no memory and no initialisation: the weights come from the pool
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    with Broker() as broker:
        with broker.attach(name, wait=60) as pool:
            attach_model(model, pool)
        tokens = AutoTokenizer.from_pretrained(folder)(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens.to(model.device)).last_hidden_state
        for text, vectors in zip(texts, hidden, strict=True):
            print(f"{text!r}: {vectors[0, :4].tolist()} …")
        del model  # the lease ends with it, the session with this block


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
