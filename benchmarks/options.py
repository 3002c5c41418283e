"""The options that all benchmarks share: devices, size, rounds, and where the results go."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cubroker.driver import load

GPU_BYTES = 8 * 10**9
HOST_BYTES = 256 * 10**6
DEFAULT_SIZES = {True: GPU_BYTES, False: HOST_BYTES}
"""Bytes of a pool on GPUs (True), and on host devices."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kMG]?)B?")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Plan:
    """The options of one run."""

    #: the broker's devices: ``cuda``, ``cuda:0``, ``host:2``
    devices: str
    #: about how many bytes a pool has
    nbytes: int
    #: how often an attach is measured
    rounds: int
    #: the folder for the results; None prints them only
    output: Path | None
    #: the machine's name in the results; None takes the name of its first device
    label: str | None
    #: the results that these are compared with
    compare: Path | None = None

    @property
    def few(self) -> int:
        """How often something slow is measured, such as one that needs a fresh process each time."""
        return max(1, self.rounds // 10)

    @property
    def gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.devices.startswith("cuda")


def parse(program: str, arguments: list[str] | None = None) -> Plan:
    """Parse the command line; a usage error ends the program with status 2."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--devices", default="cuda", help="cuda, cuda:0 or host:2 (default: cuda)")
    parser.add_argument("--size", type=byte_count, help="of a pool, such as 8GB (default: 8GB on GPUs, 256MB else)")
    parser.add_argument("--rounds", type=int, default=50, help="how often an attach is measured (default: 50)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write NAME.json and NAME.md there as well")
    parser.add_argument("--label", help="what to call this machine (default: the name of its first device)")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="say what is worse than there, with status 1")
    options = parser.parse_args(arguments)
    default = DEFAULT_SIZES[options.devices.startswith("cuda")]
    return Plan(
        options.devices, options.size or default, options.rounds, options.output, options.label, options.compare
    )


def neighbours(plan: Plan) -> tuple[str, str] | None:
    """Return the UUIDs of the first two devices that reach each other; None, with a message, if there are none."""
    driver = load(plan.devices)
    uuids = {device.index: device.uuid for device in driver.devices}
    links = {(link.device, link.peer) for link in driver.peers.matrix() if link.access}
    for device, peer in sorted(links):
        if (peer, device) in links:
            return uuids[device], uuids[peer]
    print(f"{plan.devices} has no two devices that reach each other", file=sys.stderr)
    return None


def byte_count(text: str) -> int:
    """Return the bytes of a size such as 8GB; a type for ``argparse``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 8GB or 256MB")
    return int(float(match[1]) * _UNITS[match[2]])
