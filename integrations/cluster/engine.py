"""What moves bytes from host to host: four calls, and NIXL behind them.

An engine registers memory, connects to one peer, reads that peer's memory and waits for what it reads. The peer's
processor takes no part in a read, or a thread of the engine does there. Another engine takes NIXL's place by having
these four calls.

*What an engine's process has to expect.* NIXL 1.5.1 over TCP was tried for what happens when a peer fails in the middle
of a read:

- A read that was released, from a peer that was disconnected, into memory that was deregistered, went on when the peer
  came back: 300 MiB were written after all three. Nothing is written once the agent is destroyed.
- Deregistering memory at the source does not stop a peer that reads it.
- An agent that is destroyed while it reads can end the *other* process: an assertion of UCX fails there.
- A peer that is killed is noticed at once, as an error of the read.

So there is one engine per peer, :meth:`Engine.close` destroys it, a source's process serves one peer and is killed
before its memory is unmapped, and neither side runs an engine in a process that has anything else to lose
(:mod:`~cubroker.integrations.cluster.source_process`, :mod:`~cubroker.integrations.cluster.fetch_process`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from cubroker.protocol.errors import Unavailable, Unsupported, needing

log = logging.getLogger(__name__)

NIXL = "nixl"
"""The name of the engine, which both sides of a transfer have to have."""

VARIABLES = {
    "NIXL_LOG_LEVEL": "ERROR",  # its words are in our errors
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",  # its crashes leave no dump
    "UCX_MEMTYPE_CACHE": "n",  # it would take memory that another process has allocated (`ipc`) for the host's
    # Over TCP each segment of a GPU's memory is copied by itself: with 8 KiB, as it is, 1 GB came in 4 to 11 s.
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "2m",
}
"""Variables of an engine's process, if they are not set."""

ALONE = 2
"""References that :func:`sys.getrefcount` counts of an object that one variable has."""

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Where NIXL's Python interface is: ``nixl`` chooses between the other two."""


class MemoryRegion(NamedTuple):
    """A run of bytes in the memory of one host or device."""

    pointer: int
    nbytes: int
    #: The ordinal of the GPU that has the memory, in the process that registers it; None: host memory.
    device: int | None = None


class Read(Protocol):
    """A read that is under way."""

    def done(self) -> bool:
        """Whether all bytes are there.

        Raises:
            Unavailable: the peer is gone, or the read failed; no more of it comes once the engine is closed.
        """


class Engine(Protocol):
    """Reads the memory of one peer. Not safe for threads: one thread makes all calls.

    On that thread a context of a GPU that has the memory is current: UCX takes memory for the host's otherwise.
    """

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        """Prepare memory of this process, for a peer to read or for this side to read into.

        Returns:
            what a peer connects with: a secret, since it lets its holder read the regions.

        Raises:
            Unavailable: the engine cannot use such memory.
        """

    def connect(self, metadata: bytes) -> None:
        """Connect to the peer that registered memory; ``metadata`` is what :meth:`register` returned there.

        Raises:
            Unavailable: it cannot be reached.
        """

    def read(self, local: MemoryRegion, remote: MemoryRegion) -> Read:
        """Begin to read as many bytes as ``local`` has; both lie in registered regions.

        It may block while bytes move, where the peer is on the same host.

        Raises:
            Unavailable: the peer is gone.
        """

    def close(self) -> None:
        """End all reads. Not one byte of the memory changes after this."""


def open_engine(name: str) -> Engine:
    """Return an engine.

    Raises:
        Unsupported: its package is not installed, or it is none that this build has.
        Unavailable: it cannot start here.
    """
    if name != NIXL:
        raise Unsupported(f"one side of the transfer has {name!r}, and the other one {NIXL!r}; upgrade the older one")
    return NixlEngine()


class NixlEngine:
    """An agent of NIXL with its UCX backend, and without a listener: metadata goes over our own connection."""

    def __init__(self) -> None:
        nixl = load()
        bindings = nixl.nixlBind
        #: They have no common class but Exception.
        self._errors = tuple(getattr(bindings, each) for each in dir(bindings) if each.endswith("Error"))
        self._reads: list[_NixlRead] = []
        self._kind = self._peer = ""
        with self._doing("starting NIXL"):
            config = nixl.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(f"cubroker-{os.urandom(8).hex()}", config)
        if "UCX" not in self._agent.backends:
            raise Unavailable("NIXL has no UCX backend here; install a build of it that has one")

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        """See :meth:`Engine.register`."""
        self._kind = _kind(regions[0])
        listed = [(each.pointer, each.nbytes, each.device or 0, "") for each in regions]
        with self._doing(f"registering {sum(each.nbytes for each in regions)} bytes"):
            self._agent.register_memory(listed, self._kind)
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> None:
        """See :meth:`Engine.connect`."""
        with self._doing("connecting to the source"):
            self._peer = self._agent.add_remote_agent(metadata)

    def read(self, local: MemoryRegion, remote: MemoryRegion) -> Read:
        """See :meth:`Engine.read`."""
        with self._doing("reading from the source"):
            here, there = (
                self._agent.get_xfer_descs([(each.pointer, local.nbytes, each.device or 0)], _kind(each))
                for each in (local, remote)
            )
            read = _NixlRead(self, self._agent.initialize_xfer("READ", here, there, self._peer))
            self._reads = [each for each in self._reads if not each.ended]
            self._reads.append(read)
            read.begin(self._agent)
        return read

    def state(self, handle: object) -> str:
        """Return how a transfer is: ``PROC``, ``DONE`` or ``ERR``."""
        with self._doing("reading from the source"):
            return str(self._agent.check_xfer_state(handle))

    def close(self) -> None:
        """See :meth:`Engine.close`.

        NIXL destroys its agent, and UCX its worker, with the last reference. An error whose traceback has frames of
        NIXL's keeps its objects, so the agent is taken out of them; and if another reference is left, this process
        ends, rather than that memory is written to which has gone back.
        """
        for read in self._reads:
            read.forget()
        self._reads.clear()
        agent, self._agent = self._agent, None
        if agent is not None:
            native, agent.agent = agent.agent, None
            if sys.getrefcount(native) > ALONE:
                log.critical("NIXL's agent cannot be destroyed: something refers to it; this process ends")
                os._exit(1)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise Unavailable(f"{what} failed: {error}") from None


class _NixlRead:
    def __init__(self, engine: NixlEngine, handle: Any) -> None:
        self._engine = engine
        self._handle = handle
        self._state = ""

    def begin(self, agent: Any) -> None:
        """Begin to read."""
        self._state = agent.transfer(self._handle)

    @property
    def ended(self) -> bool:
        return self._handle is None

    def done(self) -> bool:
        """See :meth:`Read.done`."""
        if self._handle is not None:
            if self._state == "PROC":
                self._state = self._engine.state(self._handle)
            if self._state == "PROC":
                return False
            self.forget()
        if self._state != "DONE":
            raise Unavailable("reading from the source failed, and NIXL does not say why")
        return True

    def forget(self) -> None:
        """Drop the transfer's handle, and its reference to the agent, which an error's traceback may keep.

        It is not released: that fails while bytes come, and ends with the agent.
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            if self._state == "DONE":
                handle.release()
            handle._released, handle._agent = True, None


def _kind(region: MemoryRegion) -> str:
    return "DRAM" if region.device is None else "VRAM"


def load() -> Any:
    """Return the module with NIXL's Python interface, of whichever CUDA it was built for.

    Raises:
        Unsupported: it is not installed.
    """
    for variable, value in VARIABLES.items():
        os.environ.setdefault(variable, value)
    with needing("a transfer between hosts", "cubroker[nixl]"):
        *others, last = PACKAGES
        for package in others:
            try:
                return import_module(f"{package}._api")
            except ModuleNotFoundError as error:
                if error.name not in PACKAGES:
                    raise
        return import_module(f"{last}._api")


def engine_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process for an engine, without the current directory on its path of imports."""
    return [sys.executable, "-P", "-m", module, *arguments]  # noqa: TID251
