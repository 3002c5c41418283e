"""``python docs/tools/assemble.py FOLDER``: write the pages of the site into a folder, as mkdocs.yml takes them.

A link of a page is the path of a file in the repository, so that it works there. The site has the README as its first
page, the pages of docs/ at its root, and every other file that a page links to under ``tree/``; the links are rewritten
so. A folder that a page links to becomes a page that lists its files. The help of all commands is written into the page
that has the line ``<!-- commands -->``.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from cubroker.cli.main import commands

ROOT = Path(__file__).parents[2]
START = "README.md"
MARK = "<!-- commands -->"
LINK = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`|(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)", re.MULTILINE | re.DOTALL)
"""The path of a link to a file; or code, which is passed over."""


def main(target: Path) -> None:
    """Write the first page, all of docs/, and from page to page every file that is linked to."""
    shutil.rmtree(target, ignore_errors=True)
    waiting = [START, *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        written = target / address(path)
        written.parent.mkdir(parents=True, exist_ok=True)
        found: list[str] = []
        if (ROOT / path).is_dir():
            found = [f"{path}/{name}" for name in _names(path)]
            written.write_text(_folder(path))
        elif path.endswith(".md"):
            found = list(links(path))
            written.write_text(_page(path))
        else:
            shutil.copy(ROOT / path, written)
        if lost := [each for each in found if not (ROOT / each).exists()]:
            raise FileNotFoundError(f"{path} links to what is not in the tree: {', '.join(lost)}")
        waiting += sorted(set(found) - seen)
        seen.update(waiting)


def address(path: str) -> str:
    """Return where a file or a folder of the repository is in the site."""
    if path == START:
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{address(f'{path}/x').removesuffix('x')}index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"tree/{path}"


def links(path: str) -> Iterator[str]:
    """Yield the paths that a page links to, in the repository."""
    for found in LINK.finditer((ROOT / path).read_text()):
        if found["path"]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), found["path"]))


def _page(path: str) -> str:
    """Return a page with its links as the site has them."""
    targets, folder = links(path), posixpath.dirname(address(path)) or "."

    def rewritten(found: re.Match[str]) -> str:
        return posixpath.relpath(address(next(targets)), folder) if found["path"] else found[0]

    text = LINK.sub(rewritten, (ROOT / path).read_text())
    context = click.Context(commands, info_name="cubroker", terminal_width=100, **commands.context_settings)
    return text.replace(MARK, "\n".join(_helps(context)))


def _folder(path: str) -> str:
    """Return a page that lists the files of a folder; pages by their titles."""
    items = []
    for name in _names(path):
        file = ROOT / path / name
        title = file.read_text().splitlines()[0].removeprefix("# ") if name.endswith(".md") else name
        link = posixpath.relpath(address(f"{path}/{name}"), posixpath.dirname(address(path)))
        items.append(f"- [{title}]({link})")
    return "\n".join([f"# {path.removeprefix('docs/').capitalize()}", "", *items, ""])


def _names(path: str) -> list[str]:
    return sorted(each.name for each in (ROOT / path).iterdir() if not each.name.startswith(("__pycache__", ".")))


def _helps(context: click.Context) -> Iterator[str]:
    """Yield a section for a command, and for those below it: its name, and its help."""
    yield f"## {context.command_path}\n\n```\n{context.get_help()}\n```\n"
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None, name
            yield from _helps(click.Context(command, context, name, terminal_width=100))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
