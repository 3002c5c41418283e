"""``cubroker vllm``: runtime pools of vLLM's models, made before engines start."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cubroker.cli import format, options


@click.group("vllm")
def vllm() -> None:
    """Prepare runtime pools for engines of vLLM."""


@vllm.command("preload", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("engine", metavar="[ENGINE ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@options.as_json
@options.directory
def preload(model: str, engine: tuple[str, ...], directory: Path, as_json: bool) -> None:
    """Load MODEL as `vllm serve MODEL` with these arguments does, publish what its ranks compute with, and exit.

    Engines with the same arguments then attach. Give all that decide what is loaded and how it is computed with: the
    parallel sizes, --dtype, --quantization, and --enforce-eager if engines have it.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is this command's
    from cubroker.integrations.vllm import preload as load

    with options.connect(directory) as broker:
        prefix = load(model, engine, directory)
        pools = [pool for pool in broker.pools() if pool.name.startswith(prefix) and pool.state == "current"]
    if as_json:
        format.document(pools)
    for pool in pools if not as_json else ():
        format.say(f"{pool.name}@{pool.version}: {format.count(pool.tensors, 'tensor')}, {format.size(pool.nbytes)}")
