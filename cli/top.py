"""``cubroker top``: a picture of devices, pools and processes, drawn once or kept up to date and changed by keys."""

from __future__ import annotations

import codecs
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cubroker.cli import format, options
from cubroker.cli.frame import NARROWEST, POOL_ORDERS, POOLS, Choice, Frame
from cubroker.client import Broker
from cubroker.client.transport.requests import expect
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Look, View

KEYS_WAIT = 0.05
"""Seconds to wait for an answer before looking for a key, and for a key before looking for the answer."""

SLOW = 2.0
"""Seconds after which the picture says that the broker does not answer."""

NAMED = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    **dict.fromkeys("\r\n", "enter"),
    **dict.fromkeys("\x7f\x08", "backspace"),
    "\x1b": "escape",
}
"""The names of what terminals send for keys, in both of their modes for cursor keys (ECMA-48, xterm)."""

KEY = re.compile(r"\x1bO.?|\x1b\[[^@-~]*[@-~]?|.", re.DOTALL)
"""What a terminal sends for one key."""

UNFINISHED = re.compile(r"\x1b(O|\[[^@-~]*)?\Z")
"""A text that ends in the middle of a sequence."""

SPLIT = 0.05
"""Seconds within which the rest of a sequence arrives; an escape that stays alone for longer is the Escape key."""


@click.command("top")
@click.option("--once", is_flag=True, help="Print it once, with all pools, and end; needs no terminal.")
@click.option(
    "--every",
    type=options.Seconds(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@options.sort(POOL_ORDERS, "size")
@options.reverse
@click.option("--filter", "wanted", default="", metavar="PATTERN", help="Only pools and processes of such names.")
@click.option(
    "--device",
    metavar="DEVICE",
    type=options.device,
    shell_complete=options.complete_devices,
    help="Only what is on this device.",
)
@options.as_json
@options.directory
def top(
    directory: Path,
    once: bool,
    every: float,
    sort: str,
    reverse: bool,
    wanted: str,
    device: str | None,
    as_json: bool,
) -> None:
    """Show the devices as bars, who waits, and which processes hold which pools; live, until q or Ctrl-C.

    A bar stands for all memory of a device. ON are indexes of devices, HELD is how long the oldest lease is held, and
    BY are processes; those that are detached have lost their connection and live. Of pools, those that take most come
    first.

    Keys: arrows, PgUp, PgDn, Home and End scroll; s sorts in another way, and r the other way round; / takes a part of
    a name, or a pattern, up to Enter; d shows the next device alone; Escape takes both back; c lists processes in place
    of pools; q ends it.

    --json prints one document, as of one moment.
    """
    choice = Choice(reverse=reverse, filter=wanted)
    choice.order[POOLS] = sort
    console = Console(highlight=False, soft_wrap=True)
    live = not (once or as_json or not console.is_terminal or console.is_dumb_terminal)
    with options.connect(directory) as broker:  # if there is none at the start, the command fails
        if device is not None:
            known = {each.uuid: each.index for each in broker.devices()}
            choice.device = known[options.find_device(device, broker.devices())]
        if not live:
            _show_once(console, broker, choice, as_json=as_json)
            return
    try:
        Screen(console, directory, every, choice).follow()
    except KeyboardInterrupt:  # the usual way to end it
        return
    except Ended as ended:
        ended.again()


def _show_once(console: Console, broker: Broker, choice: Choice, *, as_json: bool) -> None:
    view, now = seen_by(broker.session, broker.look()), time.time()
    frame = Frame(_width(), None, _is_plain(console), choice)
    if as_json:
        parts: dict[str, object] = {name: getattr(view, name) for name in view.__struct_fields__}
        chosen = {"pools": frame.pools(view), "clients": frame.clients(view)}
        format.document({"time": now} | parts | chosen)
        return
    for line in frame.lines(view, now):
        with console.capture() as captured:  # its colours, if standard output shows them
            console.print(line, end="")
        format.say(captured.get())


def seen_by(session: int, view: View) -> View:
    """Return a view without the session that looks."""
    return msgspec.structs.replace(view, clients=tuple(format.other_clients(view.clients, session)))


def _width() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


@dataclass
class Screen:
    """A picture on the terminal that follows the broker and the keys."""

    console: Console
    directory: Path
    #: Seconds between two looks.
    every: float
    choice: Choice
    _view: View | None = None
    #: Why the view is not fresh, and when it was.
    _why: str = ""
    _seen: str = ""

    def follow(self) -> None:
        """Show the broker's state until q is pressed; a broker that has ended, hangs or refuses may serve again."""
        with Terminal(self.console) as keys, Live(console=self.console, screen=True, auto_refresh=False) as live:
            self._draw(live)
            while True:
                try:
                    with options.connect(self.directory) as broker:
                        while self._look(broker, keys, live) and self._pause(keys, live):
                            pass
                        return
                except CubrokerError as error:
                    self._stale(error.message)
                    self._draw(live)
                    if not self._pause(keys, live):
                        return

    def _look(self, broker: Broker, keys: Terminal, live: Live) -> bool:
        """Show the broker's state now; keys work while it does not answer. Return whether to continue."""
        asked, began = broker.requests.submit(Look()), time.monotonic()
        while not asked.wait(KEYS_WAIT):
            if not self._press(keys.wait(KEYS_WAIT), live):
                return False
            if not self._why and time.monotonic() - began > max(SLOW, self.every):
                self._stale("the broker does not answer")
                self._draw(live)
        self._view, self._why = seen_by(broker.session, expect(asked.result(), View)), ""
        self._draw(live)
        return True

    def _stale(self, why: str) -> None:
        self._seen, self._why = time.strftime("%H:%M:%S"), why

    def _pause(self, keys: Terminal, live: Live) -> bool:
        """Handle keys until it is time to look again; return whether to continue."""
        end = time.monotonic() + self.every
        while (left := end - time.monotonic()) > 0:
            if not self._press(keys.wait(left), live):
                return False
        return True

    def _press(self, keys: Sequence[str], live: Live) -> bool:
        devices = [device.index for device in self._view.devices] if self._view else []
        going = all(self.choice.press(key, devices) for key in keys)
        self._draw(live)
        return going

    def _draw(self, live: Live) -> None:
        width, height = _width(), self.console.height
        stale = f"as of {self._seen}: {format.printable(self._why)}"
        if self._view is None:
            shown = [Text(stale if self._why else "looking for the broker")]
        else:
            frame = Frame(width, height, _is_plain(self.console), self.choice)
            shown = frame.lines(self._view, time.time())
            if self._why:
                shown[0] = Text(stale, "bold red")
                shown[0].truncate(width, overflow="ellipsis")
        live.update(Group(*shown), refresh=True)


# -- the terminal --------------------------------------------------------------------------------------


class Ended(BaseException):
    """A signal that ends the process, raised so that the terminal is restored first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def again(self) -> None:
        """Raise the signal again, with its default action."""
        signal.signal(self._number, signal.SIG_DFL)
        signal.raise_signal(self._number)


class Terminal:
    """The keys of standard input while the context lasts; none if standard input is no terminal.

    Within the context the terminal neither gathers nor echoes lines. Ctrl-C stays a signal. While the process is
    stopped by Ctrl-Z, the terminal is restored. SIGTERM and SIGHUP raise :class:`Ended`, which restores it, too.

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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._give_back()
        os.close(self._woken)
        os.close(self._wake)

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that are pressed; wait for the first one, or for a change of the terminal's size.

        A key is its character, or its name in :data:`NAMED`.
        """
        ready = self._ready(seconds)
        if self._woken in ready:
            os.read(self._woken, 1 << 12)
        if self._input not in ready:
            return []
        text = self._read()
        while UNFINISHED.search(text) and self._input in self._ready(SPLIT):
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
    """Return the keys in what a terminal sent; unknown sequences are ignored."""
    return [NAMED.get(key, key) for key in KEY.findall(text) if key in NAMED or key.isprintable()]
