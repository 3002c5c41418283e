"""``cubroker drain``."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.cli.clients import held
from cubroker.cli.connect import connect
from cubroker.client import Broker
from cubroker.protocol.bounds import MAX_WAIT
from cubroker.protocol.errors import CubrokerError, TimedOut

LOOK = 0.5
"""Seconds after which it looks again at what is held."""


@click.command("drain")
@click.option(
    "--wait",
    type=options.Seconds(min=0, max=MAX_WAIT),
    metavar="SECONDS",
    help="How long to wait at most.  [default: as long as it takes]",
)
@click.option("--off", is_flag=True, help="Lend again.")
@options.directory
def command(directory: Path, wait: float | None, off: bool) -> None:
    """Have the broker lend nothing new, tell its clients to give back what they hold, and wait until they have.

    The status is 1 if something is still held when the time is up. It stays so, whatever becomes of this command, until
    --off takes it back or the broker ends; with a store the next broker goes on like that. For root, and the
    user who runs the broker.
    """
    with connect(directory) as broker:
        broker.drain(on=not off)
        if off:
            text.say("The broker lends again.")
            return
        _wait(broker, inf if wait is None else wait)
    text.say("Nothing is held any more. The broker lends nothing until: cubroker drain --off")


def _wait(broker: Broker, seconds: float) -> None:
    """Return when nobody else holds anything, and tell on the way who does."""
    deadline = time.monotonic() + seconds
    told: dict[str, str] = {}
    while told := _tell(told, _holders(broker)):
        left = deadline - time.monotonic()
        if left <= 0:
            who = text.count(len(told), "client")
            reason = f"{who} still held something after {seconds:g} s; the broker lends nothing all the same, until:"
            raise TimedOut(f"{reason} cubroker drain --off")
        if _is_over(broker, min(LOOK, left)):
            raise CubrokerError("somebody else has had the broker lend again, so there is nothing to wait for")


def _holders(broker: Broker) -> dict[str, str]:
    """Return who holds anything, and what."""
    others = (client for client in broker.clients() if client.session != broker.session)
    return {
        f"session {client.session}, process {client.pid} of {text.user(client.uid)}": held(client)
        for client in others
        if client.leases
    }


def _tell(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    for who in before.keys() - now.keys():
        text.say(f"{who}: holds nothing any more")
    for who, what in now.items():
        if before.get(who) != what:
            text.say(f"{who}: holds {what}")
    return now


def _is_over(broker: Broker, seconds: float) -> bool:
    """Wait, and whether the draining was taken back meanwhile."""
    if broker.draining:
        return broker.wait_draining(seconds, over=True)
    broker.wait_draining(seconds)  # the notice is on its way
    return False
