"""Arithmetic of sizes."""

from __future__ import annotations


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is no less than ``nbytes``."""
    return -(-nbytes // unit) * unit
