"""The terminal of ``cubroker top``: keys one at a time, by termios, since few are needed; and what signals do to it."""

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

from rich.console import Console

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


class Ended(BaseException):
    """A signal that ends the process came; it ends once the terminal is as it was."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def again(self) -> None:
        """Have the signal do what it does by default."""
        signal.signal(self._number, signal.SIG_DFL)
        signal.raise_signal(self._number)


class Terminal:
    """The keys of standard input while the context lasts; none if it is no terminal.

    Lines are not gathered and not echoed meanwhile. Ctrl-C stays a signal. While the process is stopped by Ctrl-Z the
    terminal is as it was before. SIGTERM and SIGHUP raise :class:`Ended`, so that it is so after them, too.

    Args:
        console: shows an alternate screen, which is left while the process is stopped.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._input: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def __enter__(self) -> Self:
        if self._input is not None:
            self._before = termios.tcgetattr(self._input)
        self._take()
        for number, handler in (
            (signal.SIGWINCH, self._redraw),
            (signal.SIGTSTP, self._suspend),
            (signal.SIGTERM, self._end),
            (signal.SIGHUP, self._end),
        ):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._give_back()
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

    def _take(self) -> None:
        if self._input is not None:
            tty.setcbreak(self._input, termios.TCSANOW)

    def _give_back(self) -> None:
        if self._before is not None and self._input is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSANOW, self._before)

    def _redraw(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"w")

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)
        self._give_back()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # this returns when a shell has the process in the foreground again
        signal.signal(number, self._suspend)
        self._take()
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)
        self._redraw(number, frame)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise Ended(number)


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
