"""The process that fetches one version: ``python -m cubroker.integrations.cluster.fetch_process``.

It reads an order as a line of JSON, and prints its progress and its result as lines of JSON. It opens the version at
its sources, creates a draft, reads all of it with one thread and one engine per source, compares a digest of every
allocation with the one from the sources, and seals. If it is killed, it leaves nothing: the draft ends with it.

:mod:`~cubroker.integrations.cluster.source_choice` decides which hosts it reads from. Hosts that are still fetching the
version are sources, too, and this process announces its own part (:mod:`~cubroker.integrations.cluster.announcements`).

The main thread decides, and waits for events: a source has answered, opened the version, or is lost; an allocation is
whole, or has a wrong digest. Each source has a thread, which alone uses its connection and its engine. One more thread
computes digests of pieces as they arrive.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, TypeAlias

import msgspec

from cubroker.client import Broker, Draft, Pool, digests
from cubroker.client.devices import find
from cubroker.client.loading import loader
from cubroker.client.loading.read_plan import copy_between_devices, hold_all, target_of
from cubroker.client.transport.handshake import Silent
from cubroker.integrations.cluster import transfer_engine
from cubroker.integrations.cluster.announcements import DraftAnnouncement
from cubroker.integrations.cluster.connection import host_id
from cubroker.integrations.cluster.messages import ExportedVersion, Fetched, Order, StatusLine
from cubroker.integrations.cluster.source_choice import SourceChoice
from cubroker.integrations.cluster.source_thread import (
    Answered,
    Filled,
    Filling,
    FillingFailed,
    Lost,
    Ready,
    Reported,
    Whole,
    Wrong,
)
from cubroker.protocol.encoding import encode_json
from cubroker.protocol.errors import Corrupted, CubrokerError, NotFound, Unavailable
from cubroker.protocol.layout import Layout

REPORT = 0.1
"""Seconds between two reports of progress."""

Happened: TypeAlias = Reported | Filled
"""An event of the main thread."""


class Fetch:
    """One fetch, from the order to the published version."""

    def __init__(self, order: Order, report: Callable[[int, int], None], tell: Callable[[str], object]) -> None:
        self._order = order
        self._report = report
        #: Called by any thread, repeatedly, with what this waits for.
        self._tell = tell
        self._events: SimpleQueue[Happened] = SimpleQueue()
        self._began = time.monotonic()
        self._sources = SourceChoice(order, self._events.put)

    def run(self) -> Fetched:
        """Carry out the order; arguments and errors are those of :func:`~cubroker.integrations.cluster.fetch.fetch`."""
        order = self._order
        with ExitStack() as undo:
            broker = undo.enter_context(Broker(order.directory, connect_timeout=order.connect_timeout))
            undo.enter_context(loader.telling_waits(broker, self._tell))
            self._sources.own = host_id(broker.directory)
            order = msgspec.structs.replace(order, devices=_uuids(broker, order))
            if order.if_absent:  # callers that wait for the lock hold nothing at the sources
                undo.enter_context(broker.lock(order.name, timeout=order.wait))
                if (there := _present(broker, order)) is not None:
                    return self._there(undo.enter_context(there))
            # Both raise before a host is asked: the broker may be too old, or a package may be missing.
            digests.need(broker._session, order.name)
            transfer_engine.load()
            undo.callback(self._end_sources)
            opened = self._open()
            layout = Layout.decode(opened.layout)
            if order.if_changed and (there := _same(broker, order, opened)) is not None:
                return self._there(undo.enter_context(there))
            left = max(0.0, self._began + order.wait - time.monotonic())
            pool = undo.enter_context(_drafted(broker, order, layout, left))
            if not isinstance(pool, Draft):
                return self._there(pool)
            began = time.monotonic()
            with hold_all([target_of(replica) for replica in pool.replicas]):
                from_parts = self._fill(broker, pool, opened, undo)
            seconds = time.monotonic() - began
            uuids = [replica.memory_device.uuid for replica in pool.replicas]
            version = pool.seal(digest=digests.of_replicas(uuids, [place.digest for place in opened.places]))
            return Fetched(
                name=order.name,
                version=version,
                nbytes=layout.nbytes,
                tensors=len(layout.tensors),
                seconds=time.monotonic() - self._began,
                read_seconds=seconds,
                sources=self._sources.used,
                fetched=True,
                from_parts=from_parts,
            )

    def _end_sources(self) -> None:
        _need(self._sources.end())

    def _there(self, pool: Pool) -> Fetched:
        layout, seconds = pool.layout, time.monotonic() - self._began
        return Fetched(pool.name, pool.version, layout.nbytes, len(layout.tensors), seconds, 0.0, (), fetched=False)

    def _open(self) -> ExportedVersion:
        """Return the version as the first source that has it describes it."""
        deadline = self._began + self._order.wait
        tell = time.monotonic() + loader.WAIT_TOLD
        while True:
            self._sources.ask(again=time.monotonic() < deadline)
            if (now := time.monotonic()) >= tell:
                self._tell(self._sources.awaits)
                tell = now + loader.WAIT_TOLD
            event = self._event(min(self._sources.next_due(), max(0.0, deadline - now) or REPORT, tell - now))
            if isinstance(event, Ready) and self._sources.ready(event):
                return event.opened
            over = time.monotonic() >= deadline and not self._sources.untried
            if not self._sources.asking and (over or self._sources.hopeless):
                raise self._sources.why()

    def _fill(self, broker: Broker, draft: Draft, opened: ExportedVersion, undo: ExitStack) -> int:
        """Fill a draft from all sources, and check it; returns how many bytes came from hosts that had only a part.

        The draft is announced to the exporter until ``undo`` is closed.
        """
        filling = Filling(draft, opened, self._order.patience, self._events.put)
        sums = [place.digest for place in opened.places]
        announcement = DraftAnnouncement(broker, draft, sums, lambda: filling.have, self._order.mode)
        undo.callback(announcement.close)
        try:
            self._sources.fill(filling)
            self._complete(filling)
        finally:
            self._end_sources()  # before anything is unmapped
            filling.close()
        targets = [target_of(replica) for replica in draft.replicas]
        copy_between_devices(targets, [place.nbytes for place in opened.places])
        return filling.striping.from_parts

    def _complete(self, filling: Filling) -> None:
        """Return when every allocation is there and has its digest, and no source writes any more."""
        whole: set[tuple[int, int]] = set()
        wrong: set[tuple[int, int]] = set()
        while True:
            self._bring(filling, whole, wrong)
            _need(self._sources.leave_late(filling))
            if not (overwritten := filling.overwritten()):
                break
            whole.difference_update(overwritten)
            for each in overwritten:
                self._read_again(each, filling, wrong)
        self._report(*filling.progress)

    def _bring(self, filling: Filling, whole: set[tuple[int, int]], wrong: set[tuple[int, int]]) -> None:
        """Return when every allocation is there and once had the right digest."""
        alive = moved = time.monotonic()
        before = 0
        while len(whole) < filling.allocations:
            self._report(*filling.progress)
            self._sources.give_up()
            self._sources.leave_useless(filling)
            self._sources.ask()
            event = self._event(min(REPORT, self._sources.next_due()))
            match event:
                case Ready():
                    self._sources.ready(event)
                case Whole():
                    whole.add((event.replica, event.allocation))
                case Wrong():
                    self._read_again(event, filling, wrong)
            now = time.monotonic()
            alive = now if self._sources.bringing else alive
            late = now - alive > self._order.patience or self._sources.hopeless
            if late and not self._sources.reading:
                raise self._sources.why()
            done, total = filling.progress
            # A source with the whole version that delivers nothing is given up by its own thread.
            if done != before or done == total or self._sources.has_whole:
                before, moved = done, now
            if now - moved > self._order.patience:
                raise Unavailable(
                    f"{self._order.name} cannot be fetched: no remaining host has the whole version, and their parts"
                    f" have delivered nothing new for {self._order.patience:g} s; {done} of {total} bytes are here"
                )

    def _read_again(self, found: Wrong, filling: Filling, wrong: set[tuple[int, int]]) -> None:
        """Have an allocation with a wrong digest read again, from other sources if there are any.

        Raises:
            Corrupted: its digest was wrong twice from hosts that have the whole version, and there is no other host.
        """
        replica, allocation = found
        error = Corrupted(f"allocation {allocation} of {self._order.name} arrived with a wrong digest")
        wrote = filling.again(found)
        if self._sources.distrust(wrote, error) or self._sources.drop(wrote, error):
            return
        if (replica, allocation) in wrong:
            raise Corrupted(
                f"{error.message}, twice, and no other host has the version: the network or the source's memory"
                f" corrupts it; check it there with `cubroker verify --digest`"
            )
        wrong.add((replica, allocation))

    def _event(self, limit: float) -> Happened | None:
        """Wait up to ``limit`` seconds for an event, and handle those that every phase handles in the same way."""
        try:
            event = self._events.get(timeout=min(limit, 3600.0))
        except Empty:
            event = None
        match event:
            case Answered():
                self._sources.answered(event)
            case Lost(source, error):
                self._sources.lost(source, error)
            case FillingFailed(error):
                raise error
        self._sources.choose()
        return event


def _uuids(broker: Broker, order: Order) -> tuple[str, ...]:
    """Return the UUIDs of the devices; by default of the broker's first one, which may not be this process's first."""
    if order.devices is None:
        return (broker.devices()[0].uuid,)
    return tuple(find(broker.driver, device).uuid for device in order.devices)


def _present(broker: Broker, order: Order) -> Pool | None:
    """Return the current version, if there is one by an accepted owner."""
    try:
        assert order.devices
        return broker.attach(order.name, device=order.devices[0], owner=loader.trusted(broker, order.owners))
    except NotFound:
        return None


def _same(broker: Broker, order: Order, opened: ExportedVersion) -> Pool | None:
    """Return the current version if it has the bytes that a source has, on all devices that are to get it."""
    name = order.name
    try:
        info, layout, _ = broker.describe(name)
        answer = broker.digests(name, info.version)
    except NotFound:
        return None
    if layout.encode() != opened.layout or answer.digests is None or info.sharded:
        return None
    if not set(order.devices or ()) <= set(info.devices):
        return None
    if answer.digests.replicas[0] != tuple(place.digest for place in opened.places):
        return None
    return broker.attach(name, version=info.version, device=info.devices[0])


def _drafted(broker: Broker, order: Order, layout: Layout, wait: float) -> Pool:
    """Return a draft, or with ``if_absent`` the version that another writer has published in between."""
    return loader.drafted(
        broker,
        order.name,
        layout,
        order.owners,
        if_absent=order.if_absent,
        devices=order.devices,
        share=order.share,
        wait=wait,
        mode=order.mode,
        durable=order.durable,
    )


# -- the process ---------------------------------------------------------------------------------------

_out: BinaryIO = sys.stdout.buffer


def _say(told: StatusLine) -> None:
    """Print a line. Two threads may do so at once: a buffered stream writes the bytes of one call together."""
    _out.write(encode_json(told) + b"\n")
    _out.flush()


def _need(ended: bool) -> None:
    """Unless all engines have ended, exit immediately: a normal exit would unmap memory that they may still write."""
    if not ended:
        _say(StatusLine(error=(Unavailable.code, "a source's engine does not end; nothing was published")))
        os._exit(1)


def _end_with_caller() -> None:
    """Exit at the end of standard input: the caller is gone. The draft ends with this process."""
    while os.read(0, 1):  # not `sys.stdin`: a thread that waits in a buffered stream would block the interpreter's exit
        pass
    os._exit(1)


def main() -> None:
    """Carry out the order on standard input, and print the result."""
    global _out
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it, too, and ends this process
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    Thread(target=_end_with_caller, name="cubroker-caller", daemon=True).start()
    _out = transfer_engine.own_output()
    said = 0.0

    def report(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= REPORT or done == total:
            said = now
            _say(StatusLine(progress=(done, total)))

    status = 1
    try:
        try:
            result = StatusLine(fetched=Fetch(order, report, lambda reason: _say(StatusLine(awaits=reason))).run())
        except CubrokerError as error:
            result = StatusLine(error=(error.code, error.message), silent=isinstance(error, Silent))
        _say(result)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)  # without waiting for a thread that waits for a host, or for an engine that still writes


if __name__ == "__main__":
    main()
