"""The pages of the site as `make docs` gives them to its generator, which is not needed here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cubroker.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
try:
    import assemble
finally:
    sys.path.pop(0)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site's pages."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    assemble.main(folder)
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_or_a_file(pages: Path) -> None:
    checked = 0
    for page in pages.rglob("*.md"):
        for found in assemble.LINK.finditer(page.read_text()):
            if found["path"]:
                assert (page.parent / found["path"]).is_file(), f"{page.relative_to(pages)}: {found['path']}"
                checked += 1
    assert checked > 200


@pytest.mark.slow
def test_pages_keep_their_places_and_what_they_link_to_is_below_tree(pages: Path) -> None:
    assert (pages / "index.md").read_text().startswith("# cubroker\n")
    assert "(tree/CONTRIBUTING.md)" in (pages / "index.md").read_text()
    assert "(tree/SECURITY.md)" in (pages / "security.md").read_text()
    assert "(../security.md)" in (pages / "tree/SECURITY.md").read_text()
    assert (pages / "tree/examples/trainer.py").read_bytes() == (ROOT / "examples/trainer.py").read_bytes()
    decisions = (pages / "decisions/index.md").read_text()
    assert decisions.count("\n- [") == len(list((ROOT / "docs/decisions").glob("*.md")))


def test_the_page_of_commands_has_the_help_of_each(pages: Path) -> None:
    text = (pages / "reference/commands.md").read_text()
    assert set(COMMANDS) <= {name.split()[0] for name in re.findall(r"^## cubroker (.*)$", text, re.MULTILINE)}
    assert text.count("Usage: cubroker") == text.count("\n## cubroker")


def test_a_link_to_what_is_not_in_the_tree_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("`[code](nowhere.md)` and [text](docs/nowhere.md#there)")
    monkeypatch.setattr(assemble, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^README.md links to what is not in the tree: docs/nowhere.md$"):
        assemble.main(tmp_path / "site")
