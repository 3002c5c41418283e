"""What the image and the tests take from elsewhere: fixed by hash, and listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.deploy import containerfile
from tests.unit.deploy.image import ROOT

LISTS = ROOT / "requirements"
FILES = sorted(LISTS.iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
STAGES = containerfile.read(ROOT / "deploy/container/Containerfile")
TESTS = ("server", "cli", "numpy", "torch", "demo", "nixl", "test")
"""The extras of which the tests have all."""

ELSEWHERE = {"torch"}
"""What has builds in other indexes, with other hashes."""


def fixed(path: Path) -> dict[str, list[tuple[Requirement, list[str]]]]:
    """The requirements of a list and their hashes, by name; a name may have a version for each Python."""
    text = re.sub(r" *#.*", "", path.read_text()).replace("\\\n", " ")
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        words, *hashes = re.split(r"\s+--hash=", line)
        requirement = Requirement(words)
        found.setdefault(requirement.name.lower().replace("_", "-"), []).append((requirement, hashes))
    return found


def version(requirement: Requirement) -> str:
    """The one version that a requirement allows."""
    (only,) = requirement.specifier
    assert (only.operator, only.version.endswith(".*")) == ("==", False), requirement
    return only.version


def test_there_is_a_list_for_the_image_for_its_build_for_the_site_and_for_the_tests() -> None:
    assert [path.name for path in FILES] == ["build.txt", "docs.txt", "image.txt", "test.txt"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_in_a_list_has_one_version_and_hashes(path: Path) -> None:
    assert fixed(path)
    for requirement, hashes in (each for group in fixed(path).values() for each in group):
        assert version(requirement)
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("image.txt", [*PROJECT["dependencies"], *EXTRAS["server"], *EXTRAS["cli"]]),
        ("build.txt", tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]),
        ("docs.txt", [*PROJECT["dependencies"], *EXTRAS["docs"]]),
        ("test.txt", [*PROJECT["dependencies"], *(each for extra in TESTS for each in EXTRAS[extra])]),
    ],
)
def test_a_list_has_what_the_project_asks_for_in_versions_that_it_takes(file: str, wanted: list[str]) -> None:
    found = fixed(LISTS / file)
    for requirement in map(Requirement, wanted):
        if requirement.name in ELSEWHERE | {PROJECT["name"]}:
            assert requirement.name not in found
            continue
        candidates = found[requirement.name.lower().replace("_", "-")]
        assert all(requirement.specifier.contains(version(each)) for each, _ in candidates), requirement


def test_the_site_is_built_beside_the_tests_in_the_same_versions() -> None:
    tests, site = (fixed(LISTS / name) for name in ("test.txt", "docs.txt"))
    assert {name: [version(each) for each, _ in site[name]] for name in site.keys() & tests.keys()} == {
        name: [version(each) for each, _ in tests[name]] for name in site.keys() & tests.keys()
    }


def test_the_image_is_built_from_a_base_and_from_packages_that_are_fixed_by_their_hashes() -> None:
    text = (ROOT / "deploy/container/Containerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert {stage.base for stage in STAGES} == {base}
    scripts = [each.value for stage in STAGES for each in stage.all("RUN")]
    installs = [step for script in scripts for step in script.split("&&") if re.search(r"pip (install|wheel) ", step)]
    assert installs
    for step in installs:
        assert "--no-deps" in step
        assert "--require-hashes" in step or "--no-index" in step
    assert {name for step in installs for name in re.findall(r"requirements/(\S+)", step)} == {"build.txt", "image.txt"}


@pytest.mark.slow
def test_the_bill_of_materials_names_all_that_the_image_gets_with_its_hashes(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py")
    bill = tmp_path / "bill" / "cubroker.cdx.json"
    make = ["make", "-C", ROOT, "sbom", f"VENV={sys.prefix}", f"SBOM={bill}", "-o", f"{sys.prefix}/test"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(make, check=True, capture_output=True, env=environment)
    written = json.loads(bill.read_text())
    assert (written["bomFormat"], written["metadata"]["component"]["name"]) == ("CycloneDX", PROJECT["name"])
    listed = {
        each["purl"]: sorted(f"sha256:{hashed['content']}" for hashed in each["externalReferences"][0]["hashes"])
        for each in written["components"]
    }
    assert listed == {
        f"pkg:pypi/{name}@{version(requirement)}": sorted(hashes)
        for name, group in fixed(LISTS / "image.txt").items()
        for requirement, hashes in group
    }
