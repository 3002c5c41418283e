"""Which figures of a run are worse than those of another: ``python -m benchmarks.compare OLD.json NEW.json``.

A figure is worse if its median is worse by more than 5 % and its samples and those of the old run do not overlap: the
best new sample is worse than the worst old one. If either run has fewer than three samples, only the values are
compared, and the new one has to be worse by more than 25 %. Figures that only one of the runs has, or for which neither
more nor less is better, are left out. Runs of different machines, devices or sizes are compared as well, with a
warning.

The status is 1 if a figure is worse, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BETTER = {"GB/s": "more", "requests/s": "more", "s": "less", "ms": "less", "MB": "less"}
"""Whether more or less is better, by unit."""

MARGIN = 0.05
"""The part of a median that may be noise, even if the samples do not overlap."""

MARGIN_ALONE = 0.25
"""The same for values without samples."""

SAMPLES = 3
"""The fewest samples that show how far they lie apart."""

Document = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    sys.exit(report(json.loads(options.old.read_text()), json.loads(options.new.read_text())))


def report(old: Document, new: Document) -> int:
    """Print what is worse in ``new``, both as :mod:`benchmarks.report` writes them; return the status."""
    for key in ("devices", "nbytes"):
        if old[key] != new[key]:
            print(f"{key}: {old[key]} before, and {new[key]} now", file=sys.stderr)
    for key in sorted(set(old["machine"]) & set(new["machine"])):
        if old["machine"][key] != new["machine"][key]:
            print(f"{key}: {old['machine'][key]} before, and {new['machine'][key]} now", file=sys.stderr)
    found = worse(old["results"], new["results"])
    for line in found:
        print(line)
    if not found:
        print("no figure is worse")
    return int(bool(found))


def number(value: float) -> str:
    """Format a value with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each figure that is worse; the arguments are figures by benchmark."""
    before = {(name, figure["what"]): figure for name, figures in old.items() for figure in figures}
    return [
        f"{name}: {figure['what']}: {_shown(before[name, figure['what']])}, and now {_shown(figure)}"
        for name, figures in new.items()
        for figure in figures
        if (name, figure["what"]) in before and _is_worse(before[name, figure["what"]], figure)
    ]


def _is_worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    better = new.get("better") or BETTER.get(new["unit"], "")
    if not better or old["unit"] != new["unit"] or not old["value"] or new["value"] is None:
        return False
    # If more is better, the sign is changed, so that less is better.
    sign = -1 if better == "more" else 1
    loss = sign * (new["value"] - old["value"]) / abs(old["value"])
    if min(len(old["samples"]), len(new["samples"])) < SAMPLES:
        return bool(loss > MARGIN_ALONE)
    apart = min(sign * each for each in new["samples"]) > max(sign * each for each in old["samples"])
    return bool(loss > MARGIN and apart)


def _shown(figure: Mapping[str, Any]) -> str:
    spread = f" ({number(min(figure['samples']))} to {number(max(figure['samples']))})" if figure["samples"] else ""
    return f"{number(figure['value'])} {figure['unit']}".rstrip() + spread


if __name__ == "__main__":
    main()
