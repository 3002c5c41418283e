"""``cubroker top``: one picture of devices, pools and processes, or one that follows the broker and the keys."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cubroker.cli import format, options, processes
from cubroker.cli.frame import NARROWEST, POOL_ORDERS, POOLS, Choice, Frame
from cubroker.cli.terminal import Ended, Terminal
from cubroker.client import Broker
from cubroker.client.transport.requests import expect
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Look, View

KEYS_WAIT = 0.05
"""Seconds that an answer, or a key, is waited for while the other may come."""

SLOW = 2.0
"""Seconds after which the picture says that the broker does not answer."""


@click.command("top")
@click.option("--once", is_flag=True, help="Show it once, all pools of it, and end; also where there is no terminal.")
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
@click.option("--device", "device", metavar="DEVICE", type=options.device, help="Only what is on this device.")
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
    with options.connect(directory) as broker:  # none at all is a mistake in the command
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
    view, now = _told(broker.look(), broker.session), time.time()
    frame = Frame(_width(), None, _is_plain(console), broker.session, choice)
    if as_json:
        parts: dict[str, object] = {name: getattr(view, name) for name in view.__struct_fields__}
        chosen = {"pools": frame.pools(view), "clients": frame.clients(view)}
        format.document({"time": now} | parts | chosen)
        return
    for line in frame.lines(view, now):
        with console.capture() as captured:  # its colours, if standard output shows them
            console.print(line, end="")
        format.say(captured.get())


def _told(view: View, session: int) -> View:
    return msgspec.structs.replace(view, clients=tuple(processes.known(view.clients, session)))


def _width() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


class Screen:
    """A picture on the terminal that follows the broker and the keys.

    Args:
        console: the terminal.
        directory: where the broker serves.
        every: seconds between two looks.
        choice: what is shown.
    """

    def __init__(self, console: Console, directory: Path, every: float, choice: Choice) -> None:
        self._console = console
        self._directory = directory
        self._every = every
        self._choice = choice
        self._view: View | None = None
        self._own = 0
        self._why = ""  # why the view is not fresh
        self._seen = ""  # when it was

    def follow(self) -> None:
        """Show what there is until q; a broker that went away, hangs or refuses may serve again."""
        with Terminal(self._console) as keys, Live(console=self._console, screen=True, auto_refresh=False) as live:
            self._draw(live)
            while True:
                try:
                    with options.connect(self._directory) as broker:
                        self._own = broker.session
                        while self._look(broker, keys, live) and self._pause(keys, live):
                            pass
                        return
                except CubrokerError as error:
                    self._stale(error.message)
                    self._draw(live)
                    if not self._pause(keys, live):
                        return

    def _look(self, broker: Broker, keys: Terminal, live: Live) -> bool:
        """Show what there is now; keys work while the broker does not answer. Return whether to go on."""
        asked, began = broker.requests.submit(Look()), time.monotonic()
        while not asked.wait(KEYS_WAIT):
            if not self._press(keys.wait(KEYS_WAIT), live):
                return False
            if not self._why and time.monotonic() - began > max(SLOW, self._every):
                self._stale("the broker does not answer")
                self._draw(live)
        self._view, self._why = _told(expect(asked.result(), View), self._own), ""
        self._draw(live)
        return True

    def _stale(self, why: str) -> None:
        self._seen, self._why = time.strftime("%H:%M:%S"), why

    def _pause(self, keys: Terminal, live: Live) -> bool:
        """Do what keys say until it is time to look again; return whether to go on."""
        end = time.monotonic() + self._every
        while (left := end - time.monotonic()) > 0:
            if not self._press(keys.wait(left), live):
                return False
        return True

    def _press(self, keys: Sequence[str], live: Live) -> bool:
        devices = [device.index for device in self._view.devices] if self._view else []
        going = all(self._choice.press(key, devices) for key in keys)
        self._draw(live)
        return going

    def _draw(self, live: Live) -> None:
        width, height = _width(), self._console.height
        stale = f"as of {self._seen}: {format.printable(self._why)}"
        if self._view is None:
            shown = [Text(stale if self._why else "looking for the broker")]
        else:
            frame = Frame(width, height, _is_plain(self._console), self._own, self._choice)
            shown = frame.lines(self._view, time.time())
            if self._why:
                shown[0] = Text(stale, "bold red")
                shown[0].truncate(width, overflow="ellipsis")
        live.update(Group(*shown), refresh=True)
