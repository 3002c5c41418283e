"""The alert rules, against the metrics that there are, their page, and promtool where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_dashboard import ADDED, exposed

ROOT = Path(__file__).parents[3]
RULES_FILE = ROOT / "deploy/prometheus/alerts.yml"
TESTS_FILE = ROOT / "tests/unit/deploy/alerts_test.yml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
CASES: list[dict[str, Any]] = yaml.safe_load(TESTS_FILE.read_text())["tests"]
PAGE = (ROOT / "docs/alerts.md").read_text()
OF_SCRAPES = {"up": {"instance", "job"}}


def name_of(rule: dict[str, Any]) -> str:
    return str(rule["alert"])


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_an_alert_asks_for_metrics_and_labels_that_there_are(rule: dict[str, Any]) -> None:
    known = exposed() | OF_SCRAPES
    names = re.findall(r"\b(?:cubroker|process)_\w+|\bup\b", rule["expr"])
    assert names
    labels = set.union(*(known[name] for name in names)) | ADDED | {"job"}
    for matched in re.findall(r"\{(.*?)\}", rule["expr"]):
        assert set(re.findall(r"(\w+)=", matched)) <= labels
    for grouped in re.findall(r"\bby \((.*?)\)", rule["expr"]):
        assert set(grouped.split(", ")) <= labels
    grouped_by = re.search(r"\bby \((.*?)\)", rule["expr"])
    kept = set(grouped_by[1].split(", ")) if grouped_by else labels
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept


def test_the_page_has_a_section_for_each_alert_and_the_alert_its_address() -> None:
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == sorted(map(name_of, RULES))
    assert f"SUCCESS: {len(RULES)} rules found" in PAGE
    for rule in RULES:
        assert rule["annotations"]["page"] == f"docs/alerts.md#{name_of(rule).lower()}"
        assert f"| {rule['labels']['severity']} |" in PAGE


def test_each_alert_has_series_that_it_fires_for_and_some_that_it_does_not() -> None:
    tried = [(check["alertname"], bool(check["exp_alerts"])) for case in CASES for check in case["alert_rule_test"]]
    assert set(tried) == {(name_of(rule), fires) for rule in RULES for fires in (True, False)}


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool (Debian: the package prometheus)")
@pytest.mark.parametrize(
    "command", [("check", "rules", RULES_FILE), ("test", "rules", TESTS_FILE)], ids=["check", "test"]
)
def test_promtool_takes_the_rules_and_their_tests_pass(command: tuple[str, str, Path]) -> None:
    done = subprocess.run(
        ["promtool", *command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    if command[0] == "check":
        assert f"SUCCESS: {len(RULES)} rules found" in done.stdout
        assert f"SUCCESS: {len(RULES)} rules found" in PAGE
