"""The pages of docs/ agree with the tree, and keep the form of a page: short lines, short paragraphs, plain words."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent
from types import ModuleType

import pytest

import cubroker
from benchmarks import update_pages
from cubroker import client

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *DECISIONS, *REFERENCE])
PROSE = sorted([*PAGES, *map(ROOT.joinpath, ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"))])
"""Pages whose form is held here; the changelog is a list and may be longer."""
SHARING = (ROOT / "docs" / "sharing.md").read_text()


FOLDERS = "api|benchmarks|cli|client|deploy|docs|driver|examples|integrations|protocol|requirements|server|tests"
PRODUCT = ("api", "cli", "client", "driver", "integrations", "protocol", "server")
CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def str_of(page: Path) -> str:
    """The name of a page, from the root of the tree."""
    return str(page.relative_to(ROOT))


def called(module: Path) -> set[str]:
    """The driver's functions that a module calls."""
    nodes = (node.func for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match("cu[A-Z]", node.attr)}


FUNCTIONS = set().union(*map(called, (ROOT / "driver").glob("*.py")))
ON_GPUS = (ROOT / "tests" / "gpu" / "test_driver.py").read_text()


def rows() -> dict[str, list[str]]:
    """The cells of each row of the table of driver functions, by function."""
    lines = re.findall(r"^\| `(cu[A-Z]\w+)`(?: \(`_v\d`\))? \| (.*) \|$", SHARING, re.MULTILINE)
    return {function: cells.split(" | ") for function, cells in lines}


def defines(text: str, name: str) -> bool:
    """Whether a module has a function, a class, or a method named with its class."""
    owner, _, method = name.rpartition(".")
    if not owner:
        return bool(re.search(rf"^(def|class) {name}\b", text, re.MULTILINE))
    body = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return body is not None and bool(re.search(rf"^    def {method}\(", body[0], re.MULTILINE))


def test_every_function_of_the_driver_that_is_called_has_a_row() -> None:
    assert rows().keys() == FUNCTIONS


def test_each_function_is_written_with_the_ending_of_its_symbol() -> None:
    symbols = pytest.importorskip("cuda.bindings._internal.driver", reason="these bindings do not say").__pyx_capi__
    for function, ending in re.findall(r"^\| `(cu[A-Z]\w+)`(?: \(`(_v\d)`\))? \|", SHARING, re.MULTILINE):
        assert f"_{function}{ending}" in symbols
        assert not ending or f"_{function}" not in symbols


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
        found[function] = f"{'tests/unit/driver/test_conformance.py' if conformance else path}::{name.strip('`')}"
    return found


@pytest.mark.slow
def test_the_tests_of_the_table_call_their_functions(tmp_path: Path) -> None:
    tests, file = witnesses(), tmp_path / "calls.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.unit.driver.recorder"]
    command += ["--record-calls", str(file), *sorted(set(tests.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    recorded: dict[str, set[str]] = defaultdict(set)
    for test, names in json.loads(file.read_text()).items():
        recorded[test.partition("[")[0]].update(names)
    assert [function for function, test in tests.items() if function not in recorded[test]] == []


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PROSE, ROOT / "CHANGELOG.md"], ids=str_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", page.read_text()):
        if not target.startswith("http"):
            other = page.parent / target if target else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PROSE, ids=str_of)
def test_files_that_pages_name_are_there(page: Path) -> None:
    text = CODE.sub("", page.read_text())
    for path in re.findall(rf"\b((?:{FOLDERS})/[\w/-]+\.\w+)", text):
        assert (ROOT / path).exists(), path
    for pattern in re.findall(rf"`((?:{FOLDERS})/[\w/.*-]*)`", text):
        assert list(ROOT.glob(pattern.rstrip("/"))), pattern


# -- samples -------------------------------------------------------------------------------------------

PYTHON = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ENGINES = ("cubroker.integrations.vllm", "cubroker.integrations.sglang")
"""Modules that only an engine's own environment can import."""


def imported(sample: str) -> set[str]:
    """The names of cubroker that a sample imports, from their modules on."""
    tree = compile(dedent(sample), "sample", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.startswith("cubroker") and not name.startswith(ENGINES)}


@pytest.mark.parametrize("page", [page for page in PROSE if PYTHON.search(page.read_text())], ids=str_of)
def test_samples_are_python_and_import_what_there_is(page: Path) -> None:
    for name in set().union(*map(imported, PYTHON.findall(page.read_text()))):
        assert resolve_name(name)


# -- the site ------------------------------------------------------------------------------------------


def test_every_page_has_a_place_in_the_navigation_of_the_site() -> None:
    named = re.findall(r"^ +- (?:[\w ]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page not in DECISIONS and page.parent != ROOT}
    assert {name for name in named if not name.startswith("tree/")} == pages | {"index.md", "decisions/index.md"}
    assert [name for name in named if name.startswith("tree/") and not (ROOT / name[5:]).exists()] == []
    assert len(named) == len(set(named))


def test_the_reference_shows_every_public_name() -> None:
    shown = set().union(*(re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE) for page in REFERENCE))
    modules = {name for name in shown if isinstance(resolve_name(name), ModuleType)}
    objects = [resolve_name(name) for name in shown - modules]
    public = [getattr(package, name) for package in (cubroker, client) for name in package.__all__ if name[0] != "_"]
    assert [each for each in public if each not in objects and each.__module__ not in modules] == []


# -- form ----------------------------------------------------------------------------------------------

WIDTH = 120
"""Characters of a line, its marks of figures left out."""

PARAGRAPH = 6
"""Lines of a paragraph or of an item of a list."""

VAGUE = re.compile(r"\b(whoever|nobody|whatever)\b", re.IGNORECASE)
"""Pronouns where the subject has a name."""


def blocks(page: Path) -> list[list[str]]:
    """The paragraphs and items of a page: no code, tables or headings; lines without the marks of figures."""
    text = re.sub(r"<!--.*?-->", "", CODE.sub("", page.read_text()))
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or re.match(r" *(\||#)", line):
            found.append([])
        elif re.match(r" *([-*]|\d+\.) ", line):
            found.append([line])
        else:
            found[-1].append(line)
    return [block for block in found if block]


@pytest.mark.parametrize("page", PROSE, ids=str_of)
def test_lines_of_prose_are_short_enough_to_read(page: Path) -> None:
    lines = [line for block in blocks(page) for line in block if len(line) > WIDTH]
    assert [line for line in lines if not re.fullmatch(r"\W*\[[^\]]*\]\([^)]*\)\W*", line)] == []


@pytest.mark.parametrize("page", PROSE, ids=str_of)
def test_paragraphs_are_short_enough_to_read(page: Path) -> None:
    assert [block[0] for block in blocks(page) if len(block) > PARAGRAPH] == []


@pytest.mark.parametrize("page", PROSE, ids=str_of)
def test_sentences_name_their_subject(page: Path) -> None:
    text = re.sub(r"`[^`]*`|\w+\.py::\w+", "", CODE.sub("", page.read_text()))
    assert [line for line in text.splitlines() if VAGUE.search(line)] == []


def test_the_architecture_is_a_map_of_every_module_with_a_short_glossary() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    glossary = text.partition("## Glossary")[2].partition("\n## ")[0]
    folders = text.partition("## Folders")[2].partition("\n## ")[0]
    modules = [module.name for top in PRODUCT for module in (ROOT / top).rglob("*.py") if module.stem != "__init__"]
    assert len(text.splitlines()) <= 150
    assert len(re.findall(r"^\| ", glossary, re.MULTILINE)) - 2 <= 25
    assert [name for name, count in Counter(modules).items() if folders.count(f"`{name}`") < count] == []


@pytest.mark.parametrize("page", DECISIONS, ids=str_of)
def test_a_decision_is_one_page_with_context_decision_and_consequences(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 60
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[:3] == ["Context", "Decision", "Consequences"]
    assert re.match(r"\d{3}-[a-z0-9-]+\.md", page.name)


# -- boundaries ----------------------------------------------------------------------------------------

SECURITY = (ROOT / "docs" / "security.md").read_text()


def boundaries() -> list[list[str]]:
    """The cells of each boundary on the page about security; rows in bold are headings."""
    table = SECURITY.partition("| boundary |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [row for row in rows if not row[0].startswith("**")]


@pytest.mark.parametrize("row", boundaries(), ids=lambda row: row[0])
def test_something_holds_each_boundary_and_its_tests_are_there(row: list[str]) -> None:
    boundary, holds, tests = row
    assert " → " in boundary
    assert holds
    named = re.findall(r"([\w/]+\.py)::(test_\w+)", tests)
    assert ", ".join(map("::".join, named)) == tests, "each as pytest names it"
    for path, name in named:
        assert defines((ROOT / path).read_text(), name), f"{path} has no {name}"


# -- figures -------------------------------------------------------------------------------------------

CAMPAIGNS = ROOT / "docs" / "reliability.md"
"""Its figures are those of campaigns, which it has the commands of."""


@pytest.mark.parametrize("page", update_pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_figures_in_pages_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert len(update_pages.MARKED.findall(text)) == len(re.findall(r"<!--\s+[\w-]+:\s", text)), (
        "a mark stands before no figure, or is not in one line"
    )
    assert update_pages.written(text) == text, "write them with python -m benchmarks.update_pages"


@pytest.mark.parametrize("page", [page for page in update_pages.PAGES if page != CAMPAIGNS], ids=lambda page: page.name)
def test_no_time_and_no_rate_is_in_a_page_that_is_not_in_the_results(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = update_pages.MARKED.sub("", text)
    assert re.findall(r"(?<![\d.,≤≥] )(?<![\d.,])\d[\d.,]* ?(?:ms|µs|ns|GB/s|requests/s)\b", text) == []


def test_a_figure_is_written_from_its_line(tmp_path: Path) -> None:
    lines = [{"what": "open", "value": 0.12345, "unit": "ms"}, {"what": "a ÷ b", "value": 12345.6, "unit": ""}]
    twice = [{"what": "twice", "value": 1, "unit": "s"}] * 2
    (tmp_path / "gpu.json").write_text(json.dumps({"results": {"one": lines, "two": twice}}))
    mark, other = "<!-- gpu: open -->", "<!-- gpu: a ÷ b -->"
    assert (
        update_pages.written(f"open: {mark}7 ms, and {other}1.", tmp_path)
        == f"open: {mark}0.123 ms, and {other}12,346."
    )
    assert update_pages.written(f"{mark}… | {other}7 s", tmp_path) == f"{mark}0.123 ms | {other}12,346"
    assert update_pages.written("<!-- tpu: open -->7 ms", tmp_path) == "<!-- tpu: open -->…"
    for what, count in (("close", 0), ("twice", 2)):
        with pytest.raises(ValueError, match=rf"gpu.json has {count} lines '{what}'"):
            update_pages.written(f"<!-- gpu: {what} -->7 ms", tmp_path)
