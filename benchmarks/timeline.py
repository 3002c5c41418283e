"""A drawing of the threads of one load, and of what each of them does or waits for, from exec to exit.

::

    python -m benchmarks.timeline --devices host:1
    python -m benchmarks.timeline --devices cuda --output FOLDER      # and FOLDER/timeline.svg
    python -m benchmarks.timeline --devices cuda --loads 3            # the last of three in one process
    python -m benchmarks.timeline --loads 3 --over sharded            # the same, spread over all devices

``cubroker load`` runs under :mod:`benchmarks.spans`, and so does the broker. With ``--loads``, ``load()`` is called
again and again in one process whose context is up. In both cases another process has loaded from the broker before.
The wrapped functions take some microseconds more for each call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks import harness, model_weights
from benchmarks import spans as measured
from benchmarks.load import POOL, retire
from benchmarks.options import DEFAULT_SIZES, byte_count
from cubroker.client import Broker
from cubroker.client.devices import context
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.client.loading.loader import load
from cubroker.server.hardening import python_command

ROOT = Path(__file__).parents[1]
WIDTH = 100
"""Columns of the drawing."""

LOADS = "--several-loads"
"""The first argument of the process that loads several times."""

MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Span(NamedTuple):
    """What a thread did, in seconds from the beginning."""

    #: ``broker`` or ``client``, and the thread
    row: str
    what: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.ended - self.began


def main() -> None:
    if sys.argv[1:2] == [LOADS]:
        _load_several(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline")
    parser.add_argument("--devices", default="cuda", help="cuda, cuda:0 or host:2 (default: cuda)")
    parser.add_argument("--size", type=byte_count, help="of the file, such as 8GB (default: 8GB on GPUs, 256MB else)")
    parser.add_argument("--share", default="auto", help="how the memory is shared: auto, ipc or vmm")
    parser.add_argument("--loads", type=int, default=0, help="draw the last of so many loads in one process")
    parser.add_argument(
        "--over", default="one", choices=("one", "all", "sharded"), help="devices that several loads go to"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write timeline.svg there")
    options = parser.parse_args()
    size = options.size or DEFAULT_SIZES[options.devices.startswith("cuda")]
    with model_weights.in_memory(model_weights.tensors(size)) as path:
        spans = take(options.devices, path, options.share, options.loads, options.over)
    print(drawing(spans))
    print(totals(spans))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "timeline.svg").write_text(svg(spans))


def take(devices: str, path: Path, share: str = "auto", loads: int = 0, over: str = "one") -> list[Span]:
    """Return the spans of one load of a file, by a separate command or as the last of several loads in one process."""
    with tempfile.TemporaryDirectory(prefix="cubroker-timeline-") as folder:
        files = {who: Path(folder, who) for who in ("broker", "client")}
        # the broker starts with `-P`, which removes the current directory from the import path
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with harness.serving(devices, before=("benchmarks.spans", str(files["broker"]))) as server:
            directory = str(server.directory)
            with Broker(directory) as broker:  # the first load of a broker takes longer: it makes its contexts
                load(broker, POOL, path, share=share, **_destination(broker, path, over))
                retire(broker, POOL)
            if loads:
                inner = ("benchmarks.timeline", LOADS, directory, str(path), share, str(loads), over)
            else:
                inner = ("cubroker", "--directory", directory, "load", POOL, str(path), "--share", share)
            began = perf_counter()
            subprocess.run(
                python_command("benchmarks.spans", str(files["client"]), *inner), check=True, stdout=sys.stderr
            )
            ended = perf_counter()
        raw = [(who, *json.loads(line)) for who, file in files.items() for line in file.read_text().splitlines()]
    marks = [(what, at) for who, _, what, at, _ in raw if who == "client" and what in ("start", "begin", "end")]
    if loads:
        began, ended = (max(at for what, at in marks if what == wanted) for wanted in ("begin", "end"))
    else:
        raw.append(("client", "main", "interpreter", began, next(at for what, at in marks if what == "start")))
    return placed(raw, began, ended)


def _load_several(directory: str, path: str, share: str, loads: str, over: str) -> None:
    """In one process: load several times, and record when the last load begins and ends."""
    with Broker(directory) as broker:
        where = _destination(broker, Path(path), over)
        for device in broker.driver.devices:
            context(broker.driver, device)
        for _ in range(int(loads)):
            sleep(0.2)
            began = perf_counter()
            load(broker, POOL, path, share=share, **where)
            ended = perf_counter()
            retire(broker, POOL)
    measured.spans += [("main", "begin", began, began), ("main", "end", ended, ended)]


def _destination(broker: Broker, path: Path, over: str) -> dict[str, Any]:
    """Return the devices of a load: the first one, all with a copy on each, or all with some of the layers each."""
    devices = [device.uuid for device in broker.driver.devices]
    if over == "sharded":
        with Checkpoint.open(path) as checkpoint:
            stages = model_weights.parts([(e.name, e.dtype, e.shape) for e in checkpoint.entries], len(devices))
        return {"plan": {name: home for part, home in zip(stages, devices, strict=True) for name, _, _ in part}}
    return {"devices": devices if over == "all" else devices[:1]}


def placed(raw: Iterable[tuple[str, str, str, float, float]], began: float, ended: float) -> list[Span]:
    """Return the spans between two times, in seconds from the first one; marks, without a length, are left out."""
    return sorted(
        (
            Span(f"{who} {thread}", what, max(first, began) - began, min(last, ended) - began)
            for who, thread, what, first, last in raw
            if first < ended and last > began and last > first
        ),
        key=lambda span: (span.began, -span.ended),
    )


def lanes(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Return the spans of each row of the drawing; a span of a thread within another one is in another row."""
    rows: dict[str, list[Span]] = {}
    depths: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        open_ends = depths[span.row]
        while open_ends and open_ends[-1] <= span.began:
            open_ends.pop()
        rows.setdefault(f"{span.row}{' ' * bool(open_ends)}{'>' * len(open_ends)}", []).append(span)
        open_ends.append(span.ended)
    order = {name: number for number, name in enumerate(dict.fromkeys(span.row for span in spans))}
    return dict(sorted(rows.items(), key=lambda row: (order[row[0].rstrip("> ")], row[0])))


def drawing(spans: Sequence[Span]) -> str:
    """Return the drawing as text: a line for each row, a letter for each kind of span."""
    marks = letters(spans)
    end = max(span.ended for span in spans)
    rows = lanes(spans)
    margin = max(map(len, rows))
    lines = [f"{'':{margin}} |{0:<{WIDTH - 8}g}{end * 1e3:>5.0f} ms|"]
    for name, row in rows.items():
        cells = ["."] * WIDTH
        for span in row:
            first, last = (int(at / end * WIDTH) for at in (span.began, span.ended))
            for cell in range(first, min(WIDTH, max(last, first + 1))):
                cells[cell] = marks[span.what]
        lines.append(f"{name:{margin}} |{''.join(cells)}|")
    return "\n".join([*lines, ""])


def totals(spans: Sequence[Span]) -> str:
    """Return a table of each kind of span: how often it occurs, from when to when, and how long in all."""
    kinds: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        kinds[span.row.partition(" ")[0], span.what].append(span)
    marks = letters(spans)
    lines = [f"{'':2}{'':28}{'times':>6}{'first, ms':>11}{'last, ms':>10}{'in all, ms':>12}{'longest':>9}"]
    for (who, what), found in kinds.items():
        first, last = min(span.began for span in found), max(span.ended for span in found)
        whole, longest = sum(span.seconds for span in found), max(span.seconds for span in found)
        row = f"{len(found):6}{first * 1e3:11.1f}{last * 1e3:10.1f}{whole * 1e3:12.1f}{longest * 1e3:9.2f}"
        lines.append(f"{marks[what]:2}{f'{who}: {what}':28}{row}")
    return "\n".join(lines)


def letters(spans: Sequence[Span]) -> Mapping[str, str]:
    """Return a letter for each kind of span, in the order of their beginning."""
    return dict(zip(dict.fromkeys(span.what for span in spans), MARKS, strict=False))


def svg(spans: Sequence[Span]) -> str:
    """Return the drawing as SVG, in which a pointer over a span shows what it is."""
    end, rows, kinds = max(span.ended for span in spans), lanes(spans), list(letters(spans))
    width, left, height = 1200, 220, 18
    size = f'width="{left + width + 20}" height="{height * (len(rows) + 3)}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    for number, (name, row) in enumerate(rows.items(), 1):
        parts.append(f'<text x="4" y="{number * height + 12}">{escape(name)}</text>')
        for span in row:
            x, long = left + span.began / end * width, max(0.5, span.seconds / end * width)
            color = f"hsl({kinds.index(span.what) * 137 % 360}, 60%, 60%)"
            title = escape(f"{span.what}: {span.began * 1e3:.2f} to {span.ended * 1e3:.2f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{number * height + 2}" width="{long:.1f}" height="{height - 3}" fill="{color}">'
                f"<title>{title}</title></rect>"
            )
            if long > 7 * len(span.what):
                parts.append(f'<text x="{x + 2:.1f}" y="{number * height + 13}">{escape(span.what)}</text>')
    parts.append(f'<text x="{left}" y="12">0</text><text x="{left + width - 40}" y="12">{end * 1e3:.0f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
