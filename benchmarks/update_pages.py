"""``python -m benchmarks.update_pages``: update the figures in the pages from the files of results.

A comment before a figure names the file and the line of its result:
``<!-- nvidia-h200: ipc: of which attach() -->1.2 ms``. A figure without a result is written ``…``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.compare import number

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md")

PENDING = "…"
UNITS = ("requests/s", "GB/s", "ms", "MB", "s")

MARKED = re.compile(
    r"<!-- (?P<results>[\w-]+): (?P<what>[^>]+?) -->"
    rf"(?P<figure>{PENDING}|\d[\d.,]*(?<![.,])(?: (?:{'|'.join(UNITS)})(?![\w/]))?)"
)
"""A mark and its figure."""


def written(text: str, results: Path = RESULTS) -> str:
    """Return the text of a page with the current figures.

    Raises:
        ValueError: a figure's file has no line of that name, or several.
    """
    return MARKED.sub(lambda found: found[0].removesuffix(found["figure"]) + _figure(found, results), text)


def _figure(found: re.Match[str], results: Path) -> str:
    file = results / f"{found['results']}.json"
    if not file.exists():
        return PENDING
    benchmarks = json.loads(file.read_text())["results"].values()
    lines = [line for lines in benchmarks for line in lines if line["what"] == found["what"]]
    if len(lines) != 1:
        raise ValueError(f"{file.name} has {len(lines)} lines {found['what']!r}; name one of it")
    if lines[0]["value"] is None:
        return PENDING
    return f"{number(lines[0]['value'])} {lines[0]['unit']}".rstrip()


def main() -> None:
    """Write the pages whose figures changed, and print their names."""
    for page in PAGES:
        before = page.read_text()
        after = written(before)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
