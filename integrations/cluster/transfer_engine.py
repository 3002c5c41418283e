"""Transfer engines, which move bytes from host to host: NIXL, behind four calls, by which another could replace it.

An engine registers memory, connects to one peer, reads that peer's memory and waits for its reads. On the peer, a read
uses no processor, or one thread of the engine.

With NIXL 1.5.1 a read writes until the agent is destroyed, whatever else is done to it; deregistering memory stops no
peer that reads it; and an agent that is destroyed while it reads can end the *other* process (decision 037). So there
is one engine per peer, and :meth:`TransferEngine.close` destroys it. A source's process serves one peer and is killed
before its memory is unmapped. Neither side runs an engine in a process that has anything else to lose
(:mod:`~cubroker.integrations.cluster.source_process`, :mod:`~cubroker.integrations.cluster.fetch_process`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO, NamedTuple

from cubroker.protocol.errors import Unavailable, Unsupported, needing

log = logging.getLogger(__name__)

NIXL = "nixl"
"""The name of the engine, which both sides of a transfer have to have."""

VARIABLES = {
    "NIXL_LOG_LEVEL": "ERROR",  # our errors contain its messages
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",  # its crashes leave no dump
    "UCX_MEMTYPE_CACHE": "n",  # it would treat memory that another process has allocated (`ipc`) as host memory
    # Over TCP each segment of a GPU's memory is copied separately: with UCX's 8 KiB, 1 GB took 4 to 11 s.
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "2m",
}
"""Environment variables of an engine's process, unless they are set already."""

ALONE = 2
"""What :func:`sys.getrefcount` returns for an object that only one variable refers to."""

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Where NIXL's Python interface is: ``nixl`` chooses between the other two."""


class MemoryRegion(NamedTuple):
    """A run of bytes in the memory of one host or device."""

    pointer: int
    nbytes: int
    #: The ordinal of the GPU that has the memory, in the process that registers it; None: host memory.
    device: int | None = None


def open_engine(name: str) -> TransferEngine:
    """Return an engine.

    Raises:
        Unsupported: its package is not installed, or this build has no engine of that name.
        Unavailable: it cannot start here.
    """
    if name != NIXL:
        raise Unsupported(f"one side of the transfer has {name!r}, and the other one {NIXL!r}; upgrade the older one")
    return TransferEngine()


class TransferEngine:
    """An engine that reads the memory of one peer. Not safe for threads: one thread makes all calls.

    If the memory is on a GPU, a context of that GPU is current on that thread: else UCX treats it as host memory.

    It is an agent of NIXL with its UCX backend, and without a listener: our own connection carries the metadata.
    """

    def __init__(self) -> None:
        nixl = load()
        bindings = nixl.nixlBind
        #: The classes of NIXL's errors, which have no common base except Exception.
        self._errors = tuple(getattr(bindings, each) for each in dir(bindings) if each.endswith("Error"))
        self._reads: list[Read] = []
        self._kind = self._peer = ""
        with self._doing("starting NIXL"):
            config = nixl.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(f"cubroker-{os.urandom(8).hex()}", config)
        if "UCX" not in self._agent.backends:
            raise Unavailable("NIXL has no UCX backend here; install a build of it that has one")

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        """Prepare memory of this process, for a peer to read or for this side to read into.

        Returns:
            the metadata with which a peer connects: a secret, since it lets its holder read the regions.

        Raises:
            Unavailable: the engine cannot use such memory.
        """
        self._kind = _kind(regions[0])
        listed = [(each.pointer, each.nbytes, each.device or 0, "") for each in regions]
        with self._doing(f"registering {sum(each.nbytes for each in regions)} bytes"):
            self._agent.register_memory(listed, self._kind)
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> None:
        """Connect to the peer that registered memory; ``metadata`` is what :meth:`register` returned there.

        Raises:
            Unavailable: the peer cannot be reached.
        """
        with self._doing("connecting to the source"):
            self._peer = self._agent.add_remote_agent(metadata)

    def read(self, local: MemoryRegion, remote: MemoryRegion) -> Read:
        """Begin to read as many bytes as ``local`` has; ``local`` and ``remote`` lie in registered regions.

        If the peer is on the same host, the call may block while bytes move.

        Raises:
            Unavailable: the peer is gone.
        """
        with self._doing("reading from the source"):
            here, there = (
                self._agent.get_xfer_descs([(each.pointer, local.nbytes, each.device or 0)], _kind(each))
                for each in (local, remote)
            )
            read = Read(self, self._agent.initialize_xfer("READ", here, there, self._peer))
            self._reads = [each for each in self._reads if not each.ended]
            self._reads.append(read)
            read.begin(self._agent)
        return read

    def state(self, handle: object) -> str:
        """Return the state of a transfer: ``PROC``, ``DONE`` or ``ERR``."""
        with self._doing("reading from the source"):
            return str(self._agent.check_xfer_state(handle))

    def close(self) -> None:
        """End all reads. Not one byte of the memory changes after this.

        NIXL destroys its agent, and UCX its worker, with the last reference. The traceback of an error can keep objects
        of NIXL alive, so the native agent is removed from them. If another reference to it is left, this process exits:
        otherwise the agent could write to memory that has been given back.
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


class Read:
    """A read that is under way."""

    def __init__(self, engine: TransferEngine, handle: Any) -> None:
        self._engine = engine
        self._handle = handle
        self._state = ""

    def begin(self, agent: Any) -> None:
        """Begin to read."""
        self._state = agent.transfer(self._handle)

    @property
    def ended(self) -> bool:
        """Whether its handle is dropped."""
        return self._handle is None

    def done(self) -> bool:
        """Whether all bytes are there.

        Raises:
            Unavailable: the peer is gone, or the read failed; it can still write until the engine is closed.
        """
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
        """Drop the transfer's handle, and the handle's reference to the agent, since a traceback may keep the handle.

        An unfinished transfer is not released: that fails while bytes arrive. The transfer ends with the agent.
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            if self._state == "DONE":
                handle.release()
            handle._released, handle._agent = True, None


def _kind(region: MemoryRegion) -> str:
    return "DRAM" if region.device is None else "VRAM"


def load() -> Any:
    """Return the module with NIXL's Python interface, whichever version of CUDA it was built for.

    Raises:
        Unsupported: it is not installed.
    """
    for variable, value in VARIABLES.items():
        os.environ.setdefault(variable, value)
    with _needing():
        for package in PACKAGES:
            try:
                return import_module(f"{package}._api")
            except ModuleNotFoundError as error:
                if error.name not in PACKAGES:
                    raise
        raise ModuleNotFoundError(name=NIXL)


def need() -> None:
    """Raise ``Unsupported`` if NIXL is not installed, without importing it."""
    with _needing():
        if not any(map(find_spec, PACKAGES)):
            raise ModuleNotFoundError(name=NIXL)


def _needing() -> AbstractContextManager[None]:
    return needing("a transfer between hosts", "cubroker[nixl]")


def own_output() -> BinaryIO:
    """Keep standard output for our messages, and return it: libraries that print there print to standard error."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


def engine_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process for an engine, which does not import from the current directory."""
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", module, *arguments]  # noqa: TID251
