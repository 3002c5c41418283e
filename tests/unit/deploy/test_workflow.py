"""The forge runs the commands that contributors run, and no others."""

from __future__ import annotations

import re

import yaml

from tests.unit.deploy.image import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_forge_runs_the_commands_of_contributors() -> None:
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make dist"]
    assert "dist" in TARGETS
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


def test_a_workflow_may_only_read_and_its_actions_have_a_version() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", each) for each in used)


def test_the_forge_tests_the_oldest_python_and_that_of_the_image() -> None:
    pythons = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (image,) = re.findall(
        r"^ARG BASE=python:(\d+\.\d+)\.", (ROOT / "deploy/container/Containerfile").read_text(), re.MULTILINE
    )
    assert set(pythons) == {oldest, image}
