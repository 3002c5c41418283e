"""Docstrings as the reference of the site has them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe", reason="there is no griffelib")

EXTENSION = Path(__file__).parents[3] / "docs" / "tools" / "docstrings.py"


def loaded(name: str, *folders: Path) -> griffe.Module:
    """A package as the reference has it."""
    extensions = griffe.load_extensions(str(EXTENSION))
    package = griffe.load(name, extensions=extensions, search_paths=[*map(str, folders), *sys.path])
    assert isinstance(package, griffe.Module)
    return package


def test_every_name_in_a_docstring_is_that_of_something() -> None:
    package = loaded("cubroker")
    attach = package["client.broker.Broker.attach"]
    assert str(attach.returns) == "Pool", "and not the steps that it is made of"
    link = (
        '<autoref identifier="cubroker.client.session.Reconnecting.reconnect" optional><code>reconnect</code></autoref>'
    )
    assert link in attach.docstring.value
    assert package["protocol.status.PoolInfo.mode"].docstring.value == "The pool's permissions, like a file's."


LITTLE = """\
'''See :class:`Box`, :mod:`os.path` and :data:`ONE`::

    Box()

They are all.
'''

ONE, TWO = 1, 2

class Box:
    #: How many
    #: there are.
    count: int
    width: int  #: In metres.

    def open(self):
        "As :meth:`~Box.open`."
"""


def test_docstrings_become_markdown(tmp_path: Path) -> None:
    (tmp_path / "little.py").write_text(LITTLE)
    little = loaded("little", tmp_path)
    link = '<autoref identifier="little.{}" optional><code>{}</code></autoref>'
    box, method = link.format("Box", "Box"), link.format("Box.open", "open")
    text = f"See {box}, `os.path` and `ONE`:\n\n```python\nBox()\n```\nThey are all."
    assert little.docstring.value == text
    assert [little[f"Box.{name}"].docstring.value for name in ("count", "width", "open")] == [
        "How many there are.",
        "In metres.",
        f"As {method}.",
    ]


def test_a_name_of_nothing_ends_the_build_and_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text('def close():\n    """See :meth:`Box.shut`."""\n')
    place = re.escape(f"{tmp_path}{os.sep}wrong.py:1: Box.shut")
    with pytest.raises(griffe.ExtensionError, match=f"docstrings name what is not there:\n{place}"):
        loaded("wrong", tmp_path)
