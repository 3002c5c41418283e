"""Keys of a terminal, one at a time, while the screen is drawn; by termios, since few keys are needed."""

from __future__ import annotations

import codecs
import os
import select
import signal
import sys
import termios
import tty
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = "up", "down", "page up", "page down", "home", "end"
ENTER, ESCAPE, BACKSPACE = "enter", "escape", "backspace"

SEQUENCES = {
    "[A": UP,
    "OA": UP,
    "[B": DOWN,
    "OB": DOWN,
    "[5~": PAGE_UP,
    "[6~": PAGE_DOWN,
    "[H": HOME,
    "OH": HOME,
    "[1~": HOME,
    "[7~": HOME,
    "[F": END,
    "OF": END,
    "[4~": END,
    "[8~": END,
}
"""What terminals send for a key after an escape, in both of their modes for cursor keys (ECMA-48, xterm)."""

NAMED = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\x08": BACKSPACE, "\x1b": ESCAPE}

SPLIT = 0.05
"""Seconds in which the rest of a sequence comes; an escape that is alone for so long is the key."""


class Keys:
    """The keys of standard input while the context lasts; none if it is no terminal.

    Lines are not gathered and not echoed meanwhile. Ctrl-C and Ctrl-Z stay signals.
    """

    def __init__(self) -> None:
        self._input: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._before: list[Any] | None = None
        self._handler: Any = None
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def __enter__(self) -> Self:
        if self._input is not None:
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input, termios.TCSANOW)
        self._handler = signal.signal(signal.SIGWINCH, self._resized)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGWINCH, self._handler)
        if self._before is not None and self._input is not None:
            with suppress(termios.error):  # the terminal has gone
                termios.tcsetattr(self._input, termios.TCSANOW, self._before)
        os.close(self._woken)
        os.close(self._wake)

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that are pressed; wait for the first one, or for another size of the terminal.

        A key is its character, or one of the names above.
        """
        ready = self._ready(seconds)
        if self._woken in ready:
            os.read(self._woken, 1 << 12)
        if self._input not in ready:
            return []
        text = self._read()
        while _unfinished(text) and self._input in self._ready(SPLIT):
            text += self._read()
        return list(split(text))

    def _ready(self, seconds: float) -> list[int]:
        files = [self._woken] if self._input is None else [self._woken, self._input]
        return select.select(files, [], [], max(0.0, seconds))[0]

    def _read(self) -> str:
        assert self._input is not None
        try:
            data = os.read(self._input, 1 << 10)
        except OSError:  # EIO: the terminal has gone
            data = b""
        if not data:
            self._input = None
        return self._decoder.decode(data)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"w")


def split(text: str) -> list[str]:
    """Return the keys of what a terminal sent; unknown sequences are none."""
    keys: list[str] = []
    while text:
        if (end := _sequence(text)) > 1:
            keys += [SEQUENCES[text[1:end]]] if text[1:end] in SEQUENCES else []
        elif text[0] in NAMED:
            keys.append(NAMED[text[0]])
        elif text[0].isprintable():
            keys.append(text[0])
        text = text[end:]
    return keys


def _sequence(text: str) -> int:
    """Return how many characters the first key has."""
    if text[:2] == "\x1bO":
        return 3
    if text[:2] != "\x1b[":
        return 1
    for end in range(2, len(text)):
        if "@" <= text[end] <= "~":
            return end + 1
    return len(text)


def _unfinished(text: str) -> bool:
    """Whether a text ends in the middle of a sequence."""
    rest = text[text.rfind("\x1b") :] if "\x1b" in text else ""
    return rest in ("\x1b", "\x1bO") or (rest.startswith("\x1b[") and not any("@" <= c <= "~" for c in rest[2:]))
