"""Figures, the machine they were measured on, and the two files with both: NAME.json and NAME.md."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from math import ceil
from pathlib import Path
from textwrap import wrap

from benchmarks import compare
from benchmarks.compare import number
from benchmarks.options import Plan
from cubroker.driver import Device, load

PACKAGES = (
    "cubroker",
    "cuda-bindings",
    "torch",
    "safetensors",
    "instanttensor",
    "fastsafetensors",
    "runai-model-streamer",
    "pyzmq",
    "msgpack",
    "msgspec",
)


def _stolen() -> float:
    """Return the seconds of CPU time that the host has given to other machines since this virtual one started."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


STOLEN = _stolen()  #: At the start of the benchmark.


@dataclass(frozen=True)
class Figure:
    """One line of the results."""

    #: the measured quantity
    what: str
    #: the median, if there are several samples; None if it was not taken, as the note says
    value: float | None
    #: of the value; empty for a ratio
    unit: str
    #: conditions that a reader needs to judge the value
    note: str = ""
    #: sorted
    samples: tuple[float, ...] = ()
    #: ``more`` or ``less``: which is better; empty if neither is, or if the unit says it
    better: str = ""


def absent(what: str, why: str) -> Figure:
    return Figure(what, None, "", why)


def median(what: str, samples: Iterable[float], unit: str, note: str = "", better: str = "") -> Figure:
    """Return the median of ``samples`` as a figure; the note ends with their range."""
    values = sorted(samples)
    spread = f"{len(values)} times, {number(values[0])} to {number(values[-1])}"
    said = f"{note}; {spread}" if note else spread
    return Figure(what, statistics.median(values), unit, said, tuple(values), better)


def rate(what: str, nbytes: int, times: Iterable[float], note: str = "") -> Figure:
    """Return the median rate, in GB/s, of steps that each handle ``nbytes`` bytes in one of these times."""
    return median(what, (nbytes / each / 1e9 for each in times), "GB/s", note)


def ratio(what: str, above: Iterable[float], below: Iterable[float], note: str = "", better: str = "") -> Figure:
    """Return the median of the quotients of pairs."""
    return median(what, (one / other for one, other in zip(above, below, strict=True)), "", note, better)


def percentile(what: str, part: float, samples: Iterable[float], unit: str, note: str = "") -> Figure:
    """Return the least sample that ``part`` of all samples do not exceed: the 99th percentile for 0.99."""
    values = sorted(samples)
    value = values[ceil(part * len(values)) - 1]
    return Figure(what, value, unit, f"{note}; of {len(values)}" if note else f"of {len(values)}", tuple(values))


def machine(plan: Plan, devices: Sequence[Device]) -> dict[str, object]:
    return {
        "devices": [f"{device.name}, {device.total / 2**30:.0f} GiB" for device in devices],
        "gpu driver": nvidia_smi("driver_version") if plan.gpu else None,
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def publish(plan: Plan, results: Mapping[str, Sequence[Figure]]) -> int:
    """Print the results, and write them if the plan has a folder; return the status of the plan's comparison, or 0."""
    devices = load(plan.devices).devices
    about = machine(plan, devices)
    label = plan.label or devices[0].name
    stolen = round(_stolen() - STOLEN, 1)
    text = table(label, about | {"CPU time that the host gave to other machines": f"{stolen} s"}, plan, results)
    print(text)
    document = {
        "label": label,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about,
        "stolen_cpu_seconds": stolen,
        "devices": plan.devices,
        "nbytes": plan.nbytes,
        "results": {key: [asdict(figure) for figure in figures] for key, figures in results.items()},
    }
    if plan.output is not None:
        plan.output.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
        (plan.output / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        (plan.output / f"{name}.md").write_text(text)
    return 0 if plan.compare is None else compare.report(json.loads(plan.compare.read_text()), document)


def table(label: str, about: dict[str, object], plan: Plan, results: Mapping[str, Sequence[Figure]]) -> str:
    lines = [f"# {label}", ""]
    for key, value in about.items():
        if value is not None:
            text = f"- {key}: {_plain(value)}"
            lines += wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    lines += [f"- asked for: `--devices {plan.devices}`, pools of {plan.nbytes / 1e9:g} GB", ""]
    lines += ["| benchmark | what | figure | |", "| --- | --- | ---: | --- |"]
    for name, figures in results.items():
        lines += [f"| {name} | {f.what} | {_shown(f)} | {f.note} |" for f in figures]
    return "\n".join([*lines, ""])


def _shown(figure: Figure) -> str:
    return "-" if figure.value is None else f"{number(figure.value)} {figure.unit}"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def nvidia_smi(field: str) -> str:
    """Return a field of ``nvidia-smi`` for the first GPU; "unknown" if the program is not installed."""
    if not (program := shutil.which("nvidia-smi")):
        return "unknown"
    query = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout.partition("\n")[0]


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
