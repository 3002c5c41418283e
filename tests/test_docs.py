"""The pages of docs/ say nothing of the tree that is not so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SHARING = (ROOT / "docs" / "sharing.md").read_text()

FUNCTIONS = {
    "cuDeviceCanAccessPeer",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetP2PAtomicCapabilities",
    "cuCtxEnablePeerAccess",
    "cuCtxDisablePeerAccess",
    "cuIpcOpenMemHandle",
    "cuMulticastGetGranularity",
    "cuMulticastCreate",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastBindAddr",
    "cuMulticastUnbind",
}
ON_GPUS = (ROOT / "tests" / "gpu" / "test_driver.py").read_text()


def rows() -> dict[str, list[str]]:
    """The cells of each row of the table of driver functions, by function."""
    lines = re.findall(r"^\| `(cu[A-Z]\w+)` \| (.*) \|$", SHARING, re.MULTILINE)
    return {function: cells.split(" | ") for function, cells in lines}


def defines(text: str, name: str) -> bool:
    """Whether a module has a function, a class, or a method named with its class."""
    owner, _, method = name.rpartition(".")
    if not owner:
        return bool(re.search(rf"^(def|class) {name}\b", text, re.MULTILINE))
    body = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return body is not None and bool(re.search(rf"^    def {method}\(", body[0], re.MULTILINE))


def test_every_function_of_peers_and_multicast_has_a_row() -> None:
    assert rows().keys() == FUNCTIONS


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_where_a_function_is_used_and_tested_is_so(function: str) -> None:
    module, users, _, test, runs_on = rows()[function]
    source = (ROOT / module).read_text()
    assert f".{function}(" in source
    for user in re.findall(r"`([\w.]+)`", users):
        assert defines(source, user), f"{module} has no {user}"
    found = re.fullmatch(r"(tests/[\w/]+\.py) `(test_\w+)`", test)
    assert found, test
    path, name = found.groups()
    assert defines((ROOT / path).read_text(), name), f"{path} has no {name}"
    shared = f"from {path.removesuffix('.py').replace('/', '.')} import" in ON_GPUS
    assert runs_on == ("GPUs" if shared else "host devices")


def witnesses() -> dict[str, str]:
    """The test of each driver function that the table names, as pytest does, on host devices."""
    found = {}
    for function, (*_, test, _) in rows().items():
        path, name = test.split()
        conformance = path.rpartition("/")[2].startswith("conformance")
        found[function] = f"{'tests/driver/test_conformance.py' if conformance else path}::{name.strip('`')}"
    return found


def test_the_tests_of_the_table_call_their_functions(tmp_path: Path) -> None:
    tests, file = witnesses(), tmp_path / "calls.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.driver.recorder"]
    command += ["--record-calls", str(file), *sorted(set(tests.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    called = json.loads(file.read_text())
    assert [function for function, test in tests.items() if function not in called[test]] == []


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", page.read_text()):
        if not target.startswith("http"):
            other = page.parent / target if target else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(r"\b((?:driver|client|server|protocol|cli|tests|docs|deploy)/[\w/]+\.\w+)", text):
        assert (ROOT / path).exists(), path
