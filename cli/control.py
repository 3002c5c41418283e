"""``cubroker ping``, ``story``, ``retire`` and ``drain``: questions and orders to a running broker.

``ping`` opens no session: this module loads no ZeroMQ and no driver.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cubroker.cli import format, options
from cubroker.client.transport import handshake
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.fields import MAX_WAIT

if TYPE_CHECKING:
    from cubroker.client import Broker

PING_SECONDS = 5.0
"""Seconds that ``drain`` gives a broker to answer whether it lends."""

LOOK = 0.5
"""Seconds between two checks of the leases by ``drain``."""


@click.command("retire")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference, shell_complete=options.complete_versions)
@options.as_json
@options.directory
def retire(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Take a version, by default the current one, out of service.

    No process can attach to it any more. Its holders keep it, and its memory is freed with the last lease.
    """
    with options.connect(directory) as broker:
        retirement = broker.retire(reference.name, reference.version)
    if as_json:
        format.document({"name": reference.name, "version": retirement.version, "leases": retirement.leases})
        return
    fate = f"with the last of {format.count(retirement.leases, 'lease')}" if retirement.leases else "now"
    title = f"{reference.name}@{retirement.version}{options.where()}"
    format.say(f"{title} is retired; its memory is freed {fate}.")


@click.command("drain")
@click.option(
    "--wait",
    type=options.Seconds(min=0, max=MAX_WAIT),
    metavar="SECONDS",
    help="How long to wait at most.  [default: as long as it takes]",
)
@click.option("--off", is_flag=True, help="Lend again.")
@options.directory
def drain(directory: Path, wait: float | None, off: bool) -> None:
    """Have the broker lend nothing new, tell its clients to give back what they hold, and wait until they have.

    The status is 1 if something is still held when the time is up. The broker goes on draining after this command,
    until --off or its end; with a store the next broker goes on like that. For administrators: root, the user who runs
    the broker, and those in its setting admins.
    """
    if off and wait is not None:
        raise click.UsageError("--off ends the draining and waits for nothing: leave out --wait")
    with options.connect(directory) as broker:
        broker.drain(on=not off)
        if off:
            format.say(f"The broker{options.where()} lends again.")
            return
        if where := options.where():  # before the wait, which may be long
            format.note(f"the broker{where} lends nothing new")
        _wait_until_free(broker, inf if wait is None else wait)
    format.say("Nothing is held any more. The broker lends nothing until: cubroker drain --off")


def _wait_until_free(broker: Broker, seconds: float) -> None:
    """Return when no other client has a lease, and print until then who holds what."""
    deadline = time.monotonic() + seconds
    told: dict[str, str] = {}
    while True:
        holders = _holders(broker)
        for who in told.keys() - holders.keys():
            format.say(f"{who}: holds nothing any more")
        for who, what in holders.items():
            if told.get(who) != what:
                format.say(f"{who}: holds {what}")
        told = holders
        if not told:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            who = format.count(len(told), "client")
            reason = f"{who} still held something after {seconds:g} s; the broker still lends nothing new, until:"
            raise TimedOut(f"{reason} cubroker drain --off")
        broker.wait_draining(min(LOOK, left), over=bool(broker.draining))
        # The notice of draining may still be on its way, or draining ended before this process read it: ask.
        if not broker.draining and _lends(broker.directory):
            raise CubrokerError("another process has had the broker lend again, so there is nothing to wait for")


def _lends(directory: Path) -> bool:
    """Whether a broker answers that it lends; during a restart there is none for a moment."""
    try:
        return not handshake.ping(directory, PING_SECONDS)
    except Unavailable:
        return False


def _holders(broker: Broker) -> dict[str, str]:
    """Return the other clients with leases, and what each holds."""
    return {
        f"session {client.session}, {format.client_label(client)}": format.leases(client)
        for client in format.known_clients(broker.clients(), broker.session)
        if client.session != broker.session and client.leases
    }


@click.command("ping")
@click.option("--live", is_flag=True, help="Succeed also while it lends nothing new, or is being started again.")
@options.seconds("--timeout", "How long it may take to answer.", default=5.0, least=0.001)
@options.as_json
@options.directory
def ping(directory: Path, live: bool, timeout: float, as_json: bool) -> int:
    """Ask the broker whether it serves, without a session; status 3 if there is none, 1 if it lends nothing new.

    For probes: without --live that of readiness. With it that of liveness, which fails only where no process holds the
    broker's socket any more, so that a probe does not end a keeper which starts the broker again.
    """
    began = time.perf_counter()
    seconds = None
    try:
        obstacle = handshake.ping(directory, timeout)
        seconds = time.perf_counter() - began
    except handshake.Silent as error:
        if not live:
            raise
        obstacle = error.message
    if as_json:
        format.document({"ready": not obstacle, "seconds": seconds, "obstacle": obstacle or None})
    elif seconds is None:
        format.say(f"{directory} is held for the broker: {obstacle}")
    elif obstacle:
        took = format.duration(seconds)
        format.say(f"The broker on {directory} answers in {took}, and lends nothing new: {obstacle}")
    else:
        format.say(f"The broker on {directory} answers in {format.duration(seconds)}.")
    return options.REFUSED if obstacle and not live else 0


def _subject(value: str) -> str | int:
    """Return the number of a session, or the name of a pool without its version, or fail as wrong usage."""
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value, re.ASCII) else options.reference(value).name


@click.command("story")
@click.argument("subject", metavar="NAME|SESSION", type=_subject, shell_complete=options.complete_pools)
@options.as_json
@options.directory
def story(subject: str | int, directory: Path, as_json: bool) -> None:
    """Tell the last events of a pool, or of the session that a number names, in the order in which they happened.

    What has ended is told of for a while. A number is that of a session, although a pool could be named by one.
    """
    with options.connect(directory) as broker:
        lines = broker.story(subject)
    if as_json:
        format.document(lines)
        return
    for line in lines:
        when = datetime.fromtimestamp(line.time).astimezone()  # the local time zone
        format.say(f"{when:%Y-%m-%d %H:%M:%S}  {format.printable(line.text)}")
