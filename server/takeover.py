"""How a broker takes its place: alone in its directory, and with what an earlier broker left.

A broker locks the file ``lock`` in the directory. The lock alone does not prove that no other broker serves: if
somebody removes the file, the next broker creates and locks a new one. So a broker that has the lock also connects to
the session socket, and refuses to start if another process listens there. At its end it removes only the sockets that
it made, which it recognizes by inode.

An earlier broker leaves the service manager, the store and the sockets, then its sessions and memory. The journal does
not have what happened while no broker ran: processes exited, connections closed, and memory that was not durable is
gone. This module reports that to the ledger, in the events that a running broker would have put.
:mod:`cubroker.server.ledger.snapshot` reads the ledger's own part of the journal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cubroker.protocol.errors import CorruptJournal, Denied, Unavailable, about, reason, remedy
from cubroker.protocol.paths import LOCK, REQUEST_SOCKET, SESSION_SOCKET, check, exposure
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import DeviceAllocator, stored_as
from cubroker.server.ledger import HeldMemory, Ledger
from cubroker.server.ledger.events import ConnectionLost, LedgerEvent, MemoryLost, ProcessExited, Resumed
from cubroker.server.ledger.records import Session
from cubroker.server.store.sd_notify import VARIABLES, Manager, close_all, inherit, is_offered
from cubroker.server.store.store import AsyncNotifier, Store
from cubroker.server.transport.session import LoggedSession, SessionLog, label, recall
from cubroker.server.transport.unix_sockets import (
    Access,
    BoundSocket,
    Peer,
    give_to_group,
    overflow_id,
    probe,
    set_access,
)

log = logging.getLogger(__name__)

SO_PASSRIGHTS = 83  #: Linux 6.16: whether a Unix socket receives descriptors (asm-generic/socket.h; not in Python).
BACKLOG = 512  #: Connections that may wait to be accepted.

LISTENERS = DOOR, REQUESTS = ("door", "requests")
"""The names under which the listening sockets are handed over: the session socket, and the request socket."""

OWN = "own-"  #: The prefix of names of stored sockets that a broker made; it does not change those of socket units.

UNSTORED = "it was not durable, so its memory ended with the broker"
MISSING = "descriptors of its memory are missing from the store"


# -- the directory -------------------------------------------------------------------------------------


class Directory:
    """The directory, locked and with its two sockets listening, for as long as the context lasts; made if necessary.

    Args:
        path: the directory.
        access: who may connect; by default the broker's own user (and root) alone. It does not change sockets that
            another process has made.
        listening: sockets that listen there already, by name; this object takes them over.
        own: the names of ``listening`` sockets that an earlier broker made.
        lasting: leave the socket files in the directory at the end, since another process holds the sockets too, and
            clients may wait there.

    Raises:
        Invalid: the path is too long for a socket, or not UTF-8.
        Denied: the directory cannot be written, or another user could pose as the broker there.
        Unavailable: another broker serves there, or the system refuses a file or socket.
    """

    def __init__(
        self,
        path: Path,
        access: Access | None = None,
        listening: Mapping[str, int] | None = None,
        own: Container[str] = (),
        *,
        lasting: bool = False,
    ) -> None:
        self.path = path.absolute()
        self._access = access or Access()
        self._listening = dict(listening or {})
        self._own = own
        self._lasting = lasting
        #: The sockets that this object made, by name.
        self.fresh: dict[str, socket.socket] = {}
        #: The two listening sockets.
        self.sessions: socket.socket
        self.requests: socket.socket
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            try:
                _make(self.path)
                lock = _lock(self.path / LOCK, undo)
                _let_pass(self.path, self._access)
                self.sessions = self._socket(DOOR, self.path / SESSION_SOCKET, socket.SOCK_SEQPACKET, undo)
                self.requests = self._socket(REQUESTS, self.path / REQUEST_SOCKET, socket.SOCK_STREAM, undo)
                _sign(lock, self.path / LOCK)
            except OSError as error:
                raise _refusal(self.path, error) from None
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _socket(self, name: str, path: Path, kind: int, undo: ExitStack) -> socket.socket:
        """Return the socket that listens at ``path``: the inherited one, or a new one."""
        answer = probe(path, kind)
        if (descriptor := self._listening.pop(name, None)) is not None:
            listener = undo.enter_context(socket.socket(fileno=descriptor))
            if answer.came_from(listener, path):
                listener.setblocking(False)
                if name in self._own:
                    set_access(path, self._access)
                _refuse_descriptors(listener)
                return listener
        # Refuse also if a store holds the session socket, for a broker that is being started again. The request socket
        # is no reason to refuse: the gateway of a killed broker may hold it for a moment, and BoundSocket replaces it.
        if answer.listens and name == DOOR:
            raise Unavailable(
                f"another broker (process {answer.pid or 'unknown'}) listens on {path}; use that one, stop it and"
                f" the systemd units or `cubroker keep` that hold its sockets, or choose another directory"
            )
        bound = BoundSocket(path, kind, self._access, BACKLOG)
        undo.callback(bound.listener.close)
        undo.callback(bound.leave if self._lasting else bound.remove)
        _refuse_descriptors(bound.listener)
        self.fresh[name] = bound.listener
        return bound.listener


def _refusal(path: Path, error: OSError) -> Denied | Unavailable:
    denied = isinstance(error, PermissionError)
    advice = filter(None, (remedy(error), f"choose another directory{' or user' if denied else ''}"))
    message = f"cannot serve in {path}: {reason(error, path)}; {', or '.join(advice)}"
    return Denied(message) if denied else Unavailable(message)


def _refuse_descriptors(listener: socket.socket) -> None:
    """Have the kernel refuse descriptors that peers send to this socket; older kernels accept them, to be closed.

    Closing one may block as long as the peer likes: a TCP socket that lingers, a file on a server that does not answer.
    """
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _make(path: Path) -> None:
    """Make the directory if necessary, and refuse one where another user could pose as the broker."""
    check(path)
    _check_exposure(path)  # first, so that nothing is made below a folder that is refused
    before = os.umask(0o022)
    os.umask(before | 0o022)  # other users must not be able to write new parents either
    try:
        path.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)
    _check_exposure(path)


def _check_exposure(path: Path) -> None:
    if exposed := exposure(path, os.geteuid(), overflow_id("uid")):
        raise Denied(exposed)


def _lock(path: Path, undo: ExitStack) -> int:
    """Acquire the lock, which only one broker can hold; return its descriptor, for :func:`_sign`."""
    while True:
        with about(path), ExitStack() as attempt:
            lock = _open_lock(path)
            attempt.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"another broker (process {_signed(lock)}) serves in {path.parent}; use that one, stop it, or"
                    f" choose another directory"
                ) from None
            if _stands_at(path, lock):
                undo.push(attempt.pop_all())
                return lock


def _open_lock(path: Path) -> int:
    """Open the lock's file without changing it; refuse a file that is not a broker's, as its owner may need it."""
    lock, fault = -1, "is no regular file"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a symbolic link, a folder, a socket
            raise
    else:
        found = os.fstat(lock)
        if stat.S_ISREG(found.st_mode):
            if found.st_nlink == 1 and found.st_uid in (0, os.geteuid()):
                return lock
            fault = f"belongs to user {found.st_uid}"
            if found.st_nlink > 1:
                fault = f"has {found.st_nlink} hard links, and so may be another file as well"
        os.close(lock)
    raise Unavailable(f"cannot serve in {path.parent}: {path} {fault}; remove it, or choose another directory")


def _stands_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at ``path``: a lock on a removed file keeps no other broker out."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(lock: int, path: Path) -> None:
    """Write this process's id into the lock, for operators and for the message to the next broker."""
    with about(path):
        os.ftruncate(lock, os.pwrite(lock, f"{os.getpid()}\n".encode(), 0))


def _signed(lock: int) -> str:
    """Return the id of the process that holds a lock, which that process has written into the file."""
    text = os.pread(lock, 20, 0).strip()
    return text.decode() if text.isdigit() else "unknown"


def _let_pass(path: Path, access: Access) -> None:
    """Let the users who may connect to the sockets pass through the directory."""
    here = path.stat()
    if access.group is not None and not here.st_mode & stat.S_IXOTH:
        give_to_group(path.resolve(), access.group)  # not a symbolic link to it
    through = (stat.S_IXGRP if access.mode & 0o060 else 0) | (stat.S_IXOTH if access.mode & 0o006 else 0)
    if through & ~here.st_mode:
        path.chmod(stat.S_IMODE(here.st_mode) | through)


# -- what an earlier broker left -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InheritedFds:
    """What a broker inherits at its start."""

    #: Sends to the service manager; None: there is no service manager.
    notifier: AsyncNotifier | None
    #: Keeps descriptors beyond the broker's end; None: there is no store.
    store: Store | None
    #: Sockets that listen already, by name.
    listening: Mapping[str, int]
    #: The names of ``listening`` sockets that an earlier broker made, and not a socket unit.
    own: frozenset[str] = frozenset()
    #: Whether the service manager can have the next broker stand by.
    standby: bool = False

    @property
    def lasting(self) -> bool:
        """Whether other processes have the listening sockets too, so that they outlive this broker."""
        return self.store is not None or bool(self.listening)

    def keep(self, fresh: Mapping[str, socket.socket]) -> None:
        """Store the journal and sockets that this broker made, if there is a store. Blocks; not for the event loop.

        It is called when the broker is about to serve. So a first start that fails stores nothing, and a keeper without
        stored descriptors gives up instead of trying for ever.

        Raises:
            Unavailable: the store does not take the descriptors.
        """
        if self.store:
            self.store.begin()
            for name, listener in fresh.items():
                self.store.replace(OWN + name, listener.fileno())


@contextmanager
def inherited(
    environ: MutableMapping[str, str], handed: Mapping[str, Sequence[int]] | None = None
) -> Iterator[InheritedFds]:
    """Take over what this process inherits, while the context lasts; stored descriptors stay stored.

    Args:
        environ: the environment; the variables of the protocol are removed, since the gateway need not know them.
        handed: descriptors by name that a process received after it stood by; other processes start with them.

    Raises:
        Unavailable: the stored journal cannot be read. Everything stays stored.
    """
    with ExitStack() as undo:
        manager = Manager.from_environment(environ)
        notifier = AsyncNotifier(manager) if manager else None
        if notifier:
            undo.callback(notifier.close)
        stored = inherit(environ)
        for name, descriptors in (handed or {}).items():
            stored.setdefault(name, []).extend(descriptors)
        offered = is_offered(environ)
        for name in VARIABLES:
            environ.pop(name, None)
        listening = {name: stored.pop(name)[0] for name in LISTENERS if name in stored}
        if not (notifier and notifier.manager.limit):
            for name, descriptors in stored.items():
                log.warning("closing inherited descriptors named %s: no store is configured", name)
                close_all(descriptors)
            yield InheritedFds(notifier, None, listening, standby=offered)
            return
        made = [name for name in LISTENERS if OWN + name in stored and name not in listening]
        own = {name: stored.pop(OWN + name)[0] for name in made}
        with readable():
            store = Store(notifier, stored)
        undo.callback(store.journal.close)
        yield InheritedFds(notifier, store, {**own, **listening}, frozenset(own), offered)


@contextmanager
def readable() -> Iterator[None]:
    """Turn an unreadable journal into an error that says what to do."""
    try:
        yield
    except CorruptJournal as error:
        raise Unavailable(
            f"cannot take over from an earlier broker, and nothing was changed: {error}; repair that, or start the"
            f" version of cubroker that wrote the journal; or give up all sessions, leases and pools: end `cubroker"
            f" keep`, or, under systemd, stop the service and its sockets, and from version 254 on also: systemctl"
            f" clean --what=fdstore cubroker.service"
        ) from error


def restore(
    broker: Broker,
    ledger: Ledger,
    memory: Mapping[str, DeviceAllocator],
    store: Store,
    session_log: SessionLog,
    items: Mapping[bytes, bytes],
) -> None:
    """Have ``broker`` take over the sessions and memory that ``ledger`` has, and drop everything else from the store.

    The broker has no sessions yet. ``memory`` has the allocators of all devices on which the ledger has memory, by
    UUID, and ``items`` is the content of the journal.

    Raises:
        CorruptJournal: the journal cannot be understood. The store keeps everything.
    """
    for finding in ledger.findings:
        log.error("the ledger's record contradicted itself: %s", finding)
    sessions = ledger.sessions()
    logged, stray = recall(items, [each.id for each in sessions])
    if stray:
        log.error("dropping %d journal entries of sessions that the ledger does not know", len(stray))
        session_log.forget(stray)
    news: list[LedgerEvent] = []
    for known in sessions:
        news += _adopt_session(broker, known, logged[known.id], store)
    lost: dict[str, str] = {}
    for held in ledger.held_memory():
        if why := _lost(held, memory[held.device], broker, store):
            news.append(MemoryLost(held.ticket, why))
            if not held.lost:  # otherwise an earlier broker has logged it
                lost.setdefault(held.label, why)
    for name, why in lost.items():
        log.log(logging.WARNING if why == UNSTORED else logging.ERROR, "pool %s is lost: %s", name, why)
    broker.resume([*news, Resumed()], logged)
    store.sweep()


def _adopt_session(broker: Broker, known: Session, logged: LoggedSession, store: Store) -> Iterator[LedgerEvent]:
    """Take a session over, and yield what happened to it while no broker ran."""
    connection, pidfd = _ends(store.take(label(known.id)))
    if logged.no_secret:
        log.error("session %d (pid %d) is detached: the journal has no secret of it", known.id, known.pid)
        if connection is not None:
            with connection, suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)  # closing does not end it: the store has a duplicate
        connection = None
    peer = Peer(known.pid, known.uid, known.gid, pidfd, known.groups, known.verified)
    broker.sessions.adopt(known.id, connection, peer, logged)
    if pidfd < 0:
        yield ProcessExited(known.id)
    elif connection is None and (known.connected or not known.leases):  # without either, it should have ended
        yield ConnectionLost(known.id)


def _ends(descriptors: Sequence[int]) -> tuple[socket.socket | None, int]:
    """Return the connection of a session and the pidfd of its process; None and -1 if they are gone."""
    connection, pidfd = None, -1
    for descriptor in descriptors:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
        else:
            pidfd = descriptor
    return connection, pidfd


def _lost(held: HeldMemory, memory: DeviceAllocator, broker: Broker, store: Store) -> str:
    """Take a ticket's memory over; return why it is lost, if it is. Parts that remain are kept until it is freed."""
    if not held.durable:
        return UNSTORED
    stored = {number: store.take(stored_as(held.ticket, number)) for number in held.sizes}
    memory.adopt(held.ticket, held.sizes, stored)
    if not held.served or not all(stored.values()):
        return MISSING if held.served else f"its device {held.device} is not served any more"
    # One descriptor of each allocation, even if the store has two.
    broker.adopt_fds(held.ticket, {number: pieces[0] for number, pieces in stored.items()})
    return ""
