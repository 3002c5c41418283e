"""The failure of whoever reads what an earlier broker left, and cannot use it."""

from __future__ import annotations


class Damaged(Exception):
    """What an earlier broker recorded is damaged, or of a format that this build does not know.

    Nothing is changed, and nothing guessed: whoever catches it keeps all that is stored.
    """
