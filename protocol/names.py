"""What a pool may be called."""

from __future__ import annotations

import re

from cubroker.protocol.errors import Invalid

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,254}")


def check(name: str) -> None:
    """Raise ``Invalid`` unless ``name`` can name a pool: it must read well in a table, a URL and ``NAME@VERSION``."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name[:64]!r} cannot name a pool: use 1 to 255 letters, digits and _ . : / + - and begin with"
            f" a letter, a digit or _"
        )
