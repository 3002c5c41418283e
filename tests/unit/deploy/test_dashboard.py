"""The dashboard and the table of metrics, against the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cubroker.server.monitoring.metrics import BrokerCounters, MetricsWriter
from cubroker.server.monitoring.observer import BrokerGauges
from tests.unit.server.monitoring import scenes

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/cubroker.json").read_text())
PAGE = (ROOT / "docs/metrics.md").read_text()
TABLE = re.findall(r"^\| `(\w+)` \| (.*?) ?\| ", PAGE, re.MULTILINE)
ADDED = {"instance", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


AGGREGATED = re.compile(r"\b(sum|max)\b")
"""What makes one line of several hosts."""


def exposed(*, everything: bool = True) -> dict[str, set[str]]:
    """The labels of every sample of a broker, with everything or with what strangers may know."""
    meters = BrokerCounters()
    meters.request_answered("Attach", 0.1, "timeout")
    meters.turned_away("denied")
    meters.gateway_changed()
    text = (
        MetricsWriter(meters.registry, everything=everything)
        .text(scenes.view(2, 5), BrokerGauges(1, 2, 3, {4001: 5}))
        .decode()
    )
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def expressions() -> list[tuple[str, str, str]]:
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("panel", "expression", "legend"), expressions())
def test_a_panel_asks_for_metrics_and_labels_that_there_are(panel: str, expression: str, legend: str) -> None:
    known = exposed()
    names = re.findall(r"\b((?:cubroker|process)_\w+)\{", expression)
    assert names, panel
    labels = set.union(*(known[name] for name in names)) | ADDED
    for matched in re.findall(r"\{(.*?)\}", expression):
        assert {label for label, _ in re.findall(r"(\w+)(=~|=)", matched)} <= labels
    for grouped in re.findall(r"\bby \((.*?)\)", expression):
        assert set(grouped.split(", ")) <= labels
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    kept = re.search(r"\bby \((.*?)\)", expression)
    assert shown <= (set(kept[1].split(", ")) if kept else labels)
    if not AGGREGATED.search(expression):
        assert "instance" in shown, "lines of several hosts are told apart"


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    text = " ".join(expression for _, expression, _ in expressions())
    ours = {re.sub(r"_(sum|count|bucket)$", "", name) for name in exposed() if name.startswith("cubroker_")}
    assert [name for name in sorted(ours) if name not in text] == []


def test_the_table_of_metrics_has_those_that_there_are_with_their_labels() -> None:
    told = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in TABLE}
    found: dict[str, set[Any]] = {}
    for name, labels in exposed().items():
        if name.startswith("cubroker_"):
            found.setdefault(re.sub(r"_(sum|count|bucket)$", "", name), set()).update(labels - {"le"})
    assert told == found


def test_the_page_says_which_metrics_strangers_get() -> None:
    (told,) = re.findall(r"^Of these, readers without the token get only(.*?)\.$", PAGE, re.MULTILINE | re.DOTALL)
    prefixes = tuple(re.findall(r"`(\w+)`", told))
    ours = {name for name, _ in TABLE if name.startswith(prefixes)}
    assert exposed(everything=False).keys() == ours


def test_panels_do_not_cover_each_other_and_have_numbers_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
