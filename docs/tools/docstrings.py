"""An extension of Griffe: docstrings as they are written here, for the reference that mkdocstrings makes of them.

- Roles of Sphinx (``:meth:`Pool.switch```) become links; a name that has no entry in the reference is shown as code. If
  a role names nothing, in any module, the build ends.
- A comment ``#:`` above a field, or after it, is its description.
- A paragraph that ends in ``::`` and its indented lines become a block of code.
- Members that begin with ``_`` are left out, special methods included.
- A method that is declared as its steps (``@blocking``) is shown with what it returns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`(?P<name>[^`]+)`")
LITERAL = re.compile(r"(?P<text>\S)?::\n\n(?P<code>(?:(?: {4}.*)?\n?)+)")
STEPS = re.compile(r"Steps\[(?P<returned>.*)\]")
FINAL = ("cubroker", "cubroker.client", "cubroker.aio")
"""Where a name is looked up last: docstrings name public classes that their module does not import."""


class Docstrings(griffe.Extension):
    """Rewrites every docstring and signature of a package that has been loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: object) -> None:
        """Rewrite the package's objects, which know each other now."""
        loader.resolve_aliases(implicit=True, external=False)
        self._unknown: list[str] = []
        for each in _objects(pkg):
            if isinstance(each, griffe.Attribute) and each.docstring is None and (text := _comment(each)):
                each.docstring = griffe.Docstring(text, parent=each)
            if each.docstring is not None:
                each.docstring.value = self._markdown(each, each.docstring.value)
            if isinstance(each, griffe.Function) and any("blocking" in str(by.value) for by in each.decorators):
                returned = STEPS.fullmatch(str(each.returns))
                each.returns = returned["returned"] if returned else each.returns
        for each in list(_objects(pkg)):
            if each.is_class:
                each.members = {name: one for name, one in each.members.items() if name[0] != "_" or name == "__init__"}
        if self._unknown:
            raise griffe.ExtensionError("docstrings name what is not there:\n" + "\n".join(self._unknown))

    def _markdown(self, owner: griffe.Object, text: str) -> str:
        text = LITERAL.sub(_block, text)
        return ROLE.sub(lambda found: self._link(owner, found["name"]), text)

    def _link(self, owner: griffe.Object, name: str) -> str:
        """Return a link that is plain code where the reference has no such entry."""
        shown = name.lstrip("~.") if not name.startswith("~") else name.rpartition(".")[2]
        found = _lookup(owner, name.lstrip("~."))
        if found is None:
            if name.partition(".")[0] not in sys.stdlib_module_names and not _one_of_several(owner, name):
                self._unknown.append(f"{owner.filepath}:{owner.lineno or 1}: {name}")
            return f"`{shown}`"
        return f'<autoref identifier="{found.canonical_path}" optional><code>{shown}</code></autoref>'


def _objects(owner: griffe.Object) -> Iterator[griffe.Object]:
    yield owner
    for member in owner.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _one_of_several(owner: griffe.Object, name: str) -> bool:
    """Whether the module assigns to the name beside others, ``A, B = …``, which Griffe passes over."""
    file = owner.filepath
    return isinstance(file, Path) and any(re.match(rf"[\w, ]*\b{name}\b[\w, ]* = ", line) for line in _source(file))


def _comment(attribute: griffe.Attribute) -> str:
    """Return the comment ``#:`` of an attribute; nothing if it has none."""
    if not attribute.lineno or not isinstance(attribute.filepath, Path):
        return ""
    lines = _source(attribute.filepath)
    _, mark, behind = lines[(attribute.endlineno or attribute.lineno) - 1].partition("  #: ")
    above = []
    for line in reversed(lines[: attribute.lineno - 1]):
        if not line.lstrip().startswith("#: "):
            break
        above.insert(0, line.lstrip()[3:])
    return behind if mark else " ".join(above)


@cache
def _source(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _block(found: re.Match[str]) -> str:
    code = re.sub(r"^ {4}", "", found["code"].strip("\n"), flags=re.MULTILINE)
    return f"{found['text']}:\n\n```python\n{code}\n```\n" if found["text"] else f"```python\n{code}\n```\n"


def _lookup(owner: griffe.Object, name: str) -> griffe.Object | griffe.Alias | None:
    """Return what a docstring of ``owner`` names: from the nearest scope outwards, then as public users name it."""
    scope: griffe.Object | griffe.Alias | None = owner
    while scope is not None:
        if found := _member(scope, name):
            return found
        scope = scope.parent
    collection = owner.modules_collection
    for path in (name, *(f"{package}.{name}" for package in FINAL)):
        first, _, rest = path.partition(".")
        if first in collection and (found := _member(collection[first], rest)):
            return found
    return None


def _member(scope: griffe.Object | griffe.Alias, name: str) -> griffe.Object | griffe.Alias | None:
    """Return the member of that dotted name, or what it is imported from."""
    found = scope
    for part in filter(None, name.split(".")):
        try:
            found = found.all_members[part]
            found = found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None
    return found
