"""Show where an engine on a pool differs from a plain one: ``python -m tests.engines.compare MODEL [--graphs]``.

Runs plain engines and engines on a pool of the broker on ``$CUBROKER_DIR``, one after the other, and compares what they
say, how long they take to start, whether compiled code of the one serves the other, and for every tensor its class,
dtype, shape, strides, alignment, attributes and place in the order of names. Needs vLLM; on a GPU, one GPU.

What is printed is one JSON document a line: each engine, then each pair of engines with what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHOWN = 12
"""Tensors that differ, of each kind of difference, that are named."""


def started(job: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    """Start an engine whose compiled code is kept in a folder, and return what came of it."""
    before = {path for path in cache.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.engine_process"],
        input=json.dumps(job) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache)},
        check=False,
    )
    reply: dict[str, Any] = json.loads(done.stdout or '{"error": "it ended without a word"}')
    added = [path for path in cache.rglob("*") if path.is_file() and path not in before]
    reply["compiled"] = sorted({path.relative_to(cache).parts[:3] for path in added})
    return reply


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what two engines differ in."""
    ours, theirs = one.get("tensors", {}), other.get("tensors", {})
    found: dict[str, Any] = {
        "said": one.get("said") == other.get("said"),
        "order": list(ours) == list(theirs),
        "only one has": sorted(ours.keys() - theirs.keys())[:SHOWN],
        "only the other has": sorted(theirs.keys() - ours.keys())[:SHOWN],
    }
    for fact in ("kind", "type", "dtype", "shape", "strides", "offset", "aligned", "attributes", "requires_grad"):
        pairs = {
            name: (facts[fact], theirs[name][fact])
            for name, facts in ours.items()
            if name in theirs and facts[fact] != theirs[name][fact]
        }
        if pairs:
            found[fact] = [len(pairs), dict(list(pairs.items())[:SHOWN])]
    return found


def main() -> None:
    """Run the engines of a comparison, and print what they differ in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--graphs", action="store_true", help="with torch.compile and CUDA graphs")
    parser.add_argument("--extra", default="{}", help="what --model-loader-extra-config gets, as JSON")
    options = parser.parse_args()
    engine = {"enforce_eager": not options.graphs}
    base = {"model": str(options.model), "do": ["said", "tensors"], "engine": engine}
    pool = {**base, "format": "cubroker", "extra": json.loads(options.extra)}
    plain = {**base, "format": "auto"}
    with tempfile.TemporaryDirectory() as folder:
        shared, apart = Path(folder) / "shared", Path(folder) / "apart"
        shared.mkdir()
        apart.mkdir()
        engines = {
            "plain": started(plain, shared),
            "plain again": started(plain, shared),  # compiles nothing if the cache works
            "publisher": started(pool, shared),  # compiles nothing if it computes with the same
            "attacher": started(pool, shared),
            "attacher that compiles": started(pool, apart),
        }
    for name, engine in engines.items():
        told = {key: value for key, value in engine.items() if key != "tensors"}
        print(json.dumps({"engine": name, **told}))
    for name in ("plain again", "publisher", "attacher", "attacher that compiles"):
        print(json.dumps({"plain and": name, **differences(engines["plain"], engines[name])}))


if __name__ == "__main__":
    main()
