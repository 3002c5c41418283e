"""A Triton server whose model has its weights in one pool, and its inputs and outputs in another.

cubroker serve --devices host:1 &
python examples/triton-server/client.py publish
tritonserver --model-repository=examples/triton-server/model_repository &
python examples/triton-server/client.py infer [URL]
"""

from __future__ import annotations

import sys

import numpy as np

from cubroker import Broker
from cubroker.integrations import triton

WEIGHTS, IO = "examples/perceptron", "examples/perceptron-io"
WIDTH, HIDDEN, BATCH = 512, 8192, 16


def publish() -> None:
    """Publish the weights that the instances of the model compute with."""
    random = np.random.default_rng(0)
    weights = {
        "up": random.standard_normal((HIDDEN, WIDTH), np.float32),
        "down": random.standard_normal((WIDTH, HIDDEN), np.float32),
    }
    with Broker(wait=60) as broker:
        print(f"{WEIGHTS}@{broker.publish(WEIGHTS, weights)}")


def infer(url: str = triton.URL) -> None:
    """Have the server compute a batch, and compare the answer with what numpy computes from the weights."""
    with Broker() as broker:
        layout = [("X", "F32", (BATCH, WIDTH)), ("Y", "F32", (BATCH, WIDTH))]
        with broker.create(IO, layout, writable=True, share="ipc") as draft:  # the kind that Triton can open on a GPU
            version = draft.seal()
        with broker.attach(IO, version=version) as pool, triton.register(pool, url) as regions:
            x = np.random.default_rng(1).standard_normal((BATCH, WIDTH), np.float32)
            pool["X"].copy_from(x)
            (answer,) = regions.infer("perceptron", inputs={"X": "X"}, outputs={"Y": "Y"}).values()
            y = np.frombuffer(pool["Y"].tobytes(), np.float32).reshape(BATCH, WIDTH)
            print(f"Y is {answer.datatype} {answer.shape}, {regions['Y'].nbytes} bytes in {regions['Y'].region}")
        broker.retire(IO, version)  # after the regions were unregistered
        with broker.attach(WEIGHTS) as pool:
            up, down = (np.frombuffer(pool[name].tobytes(), np.float32) for name in ("up", "down"))
        expected = np.maximum(x @ up.reshape(HIDDEN, WIDTH).T, 0) @ down.reshape(WIDTH, HIDDEN).T
        print(f"largest difference to numpy: {np.abs(y - expected).max() / np.abs(expected).max():.0e} of the largest")


if __name__ == "__main__":
    work = {"publish": publish, "infer": infer}.get(" ".join(sys.argv[1:2]))
    if work is None:
        sys.exit(__doc__)
    work(*sys.argv[2:])
