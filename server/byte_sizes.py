"""Sizes as people write them: ``10GiB``, ``512MB``, ``90%``."""

from __future__ import annotations

import re

from cubroker.protocol.errors import Invalid

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power, _prefix: 1024**_power}

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)
_SHARE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*%", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size: ``4096``, ``10GiB`` (or ``10G``), ``1.5GB``.

    Raises:
        Invalid: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise Invalid(f"{text!r} is no size: write a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_budget(text: str, total: int) -> int:
    """Return the bytes that a budget grants of a device of ``total`` bytes: a size, or a share such as ``90%``.

    Raises:
        Invalid: it is neither, or 0, or more than the device has.
    """
    match = _SHARE.fullmatch(text.strip())
    budget = int(total * float(match[1]) / 100) if match else parse_bytes(text)
    if not 0 < budget <= total:
        raise Invalid(
            f"a budget of {text} is {budget} bytes, and the device has {total}; it can be 1 byte to all of them"
        )
    return budget
