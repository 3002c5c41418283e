"""Which devices reach each other's memory, how well they do, and direct access from one to another while it is used."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cubroker.driver.calls import Calls, DriverError, explained
from cubroker.driver.errors import too_many_peers

if TYPE_CHECKING:
    from cubroker.driver.context import Context, Device


@dataclass(frozen=True)
class Link:
    """What the driver says about the way from one device to another.

    Attributes:
        device: the ordinal of the device that reads and writes.
        peer: the ordinal of the device whose memory it is.
        access: whether it can do so directly.
        performance_rank: how fast, compared with this host's other links; 0 is the fastest.
        native_atomics: whether every atomic operation goes over the link.
        array_access: whether CUDA arrays can be read and written too.
        only_partial_atomics: whether some atomic operations do and others do not; see :meth:`Peers.atomics`.
    """

    device: int
    peer: int
    access: bool
    performance_rank: int
    native_atomics: bool
    array_access: bool
    only_partial_atomics: bool


@dataclass
class _Use:
    """Direct access from one context to another. If somebody else had enabled it, it is not ours to disable."""

    ours: bool
    count: int = 0


_uses: dict[tuple[Any, int, int], _Use] = {}
"""By driver-shaped module and ordinals. A process has one primary context per device, so access is counted for all."""

_lock = threading.Lock()


class Peers:
    """The links between devices; see :attr:`Driver.peers`. Devices are named by ordinal. Any thread may call.

    Every method raises :class:`DriverError`, which says between which devices and why, where the driver refuses.
    """

    def __init__(self, calls: Calls, devices: Sequence[Device], context: Callable[[int], Context]) -> None:
        self._calls = calls
        self._devices = tuple(device.index for device in devices)
        self._context = context
        self._held: Counter[tuple[Context, Context]] = Counter()

    # -- what the links are ------------------------------------------------------------------------

    def can_access(self, device: int, peer: int) -> bool:
        """Whether ``device`` can read and write the memory of ``peer`` directly; its own it always can."""
        with _about(device, peer):
            source, target = self._calls.cuDeviceGet(device), self._calls.cuDeviceGet(peer)
            return device == peer or bool(self._calls.cuDeviceCanAccessPeer(source, target))

    def link(self, device: int, peer: int) -> Link:
        """Describe the way from ``device`` to ``peer``, two devices (else CUDA_ERROR_INVALID_DEVICE)."""
        with _about(device, peer):
            return Link(
                device,
                peer,
                access=bool(self._attribute("ACCESS_SUPPORTED", device, peer)),
                performance_rank=self._attribute("PERFORMANCE_RANK", device, peer),
                native_atomics=bool(self._attribute("NATIVE_ATOMIC_SUPPORTED", device, peer)),
                array_access=bool(self._attribute("CUDA_ARRAY_ACCESS_SUPPORTED", device, peer)),
                only_partial_atomics=self._only_partial(device, peer),
            )

    def matrix(self) -> tuple[Link, ...]:
        """Describe the way from each of the driver's devices to each other one."""
        return tuple(self.link(device, peer) for device in self._devices for peer in self._devices if device != peer)

    def atomics(self, device: int, peer: int) -> Mapping[str, frozenset[str]]:
        """Return, for each atomic operation, in which forms the link does it natively; in none if the set is empty.

        Operations are named like ``integer_add`` and ``cas``, forms like ``signed`` and ``scalar_64``
        (``CUatomicOperation``, ``CUatomicOperationCapability``). Operations that the driver does not know
        are left out; one older than CUDA 13.0 knows none. Between two H200, driver 580.159 knows all of them
        and names no form of any, while the link's ``native_atomics`` is true.
        """
        operations = getattr(self._calls.module, "CUatomicOperation", ())
        with _about(device, peer), suppress(RuntimeError):  # the bindings find no such function in an older driver
            answers = [
                (_short(operation), self._capabilities(operation, device, peer))
                for operation in operations
                if _short(operation) != "max"  # the end of the list, not an operation
            ]
            return {name: forms for name, forms in answers if forms is not None}
        return {}

    # -- direct access -----------------------------------------------------------------------------

    def enable(self, context: Context, peer: int) -> None:
        """Let the work of ``context`` use all memory allocated in the context of ``peer``; not the other way round.

        It counts: each call needs its own :meth:`disable`, and access ends with the last one in this process.
        Access that somebody else in the process had enabled before is used, and left as it was. Memory
        opened by handle and memory mapped into a :class:`Reservation` do not need this.
        """
        other = self._context(peer)
        key = self._key(context, peer)
        with _lock:
            use = _uses.get(key) or _Use(ours=self._enabled(context, other))
            use.count += 1
            _uses[key] = use
            self._held[context, other] += 1

    def disable(self, context: Context, peer: int) -> None:
        """Undo one :meth:`enable`, once the work that needs the access is done."""
        with _lock:
            for held, other in self._held:
                if held is context and other.device.index == peer:
                    return self._undo(context, other)
        code = self._calls.module.CUresult.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        raise DriverError("cuCtxDisablePeerAccess", int(code), code.name, _texts(context.device.index, peer)[code.name])

    def close(self) -> None:
        """Undo every :meth:`enable` that was not undone."""
        with _lock:
            for context, other in tuple(self._held.elements()):
                with suppress(DriverError):  # a context that a failed kernel has ruined refuses everything
                    self._undo(context, other)

    def _enabled(self, context: Context, other: Context) -> bool:
        """Enable access and return whether that was needed."""
        try:
            with _about(context.device.index, other.device.index), context.current():
                self._calls.cuCtxEnablePeerAccess(other.handle, 0)
        except DriverError as error:
            if error.name == "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                return False
            raise
        return True

    def _undo(self, context: Context, other: Context) -> None:
        self._held -= Counter([(context, other)])
        key = self._key(context, other.device.index)
        use = _uses[key]
        use.count -= 1
        if use.count:
            return
        del _uses[key]
        if use.ours:
            with _about(context.device.index, other.device.index), context.current():
                self._calls.cuCtxDisablePeerAccess(other.handle)

    def _key(self, context: Context, peer: int) -> tuple[Any, int, int]:
        return self._calls.module, context.device.index, peer

    # -- questions ---------------------------------------------------------------------------------

    def _attribute(self, name: str, device: int, peer: int) -> int:
        attribute = getattr(self._calls.module.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        source, target = self._calls.cuDeviceGet(device), self._calls.cuDeviceGet(peer)
        return int(self._calls.cuDeviceGetP2PAttribute(attribute, source, target))

    def _only_partial(self, device: int, peer: int) -> bool:
        """Ask for what bindings and drivers know since CUDA 13.0; before that, nobody can say so."""
        try:
            return bool(self._attribute("ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED", device, peer))
        except AttributeError:
            return False
        except DriverError as error:
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return False
            raise

    def _capabilities(self, operation: Any, device: int, peer: int) -> frozenset[str] | None:
        """Return the forms of one operation; asked one by one, since a single unknown one has all refused."""
        source, target = self._calls.cuDeviceGet(device), self._calls.cuDeviceGet(peer)
        try:
            (bits,) = self._calls.cuDeviceGetP2PAtomicCapabilities([operation], 1, source, target)
        except DriverError as error:
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return None
            raise
        return frozenset(_short(form) for form in self._calls.module.CUatomicOperationCapability if int(form) & bits)


def _short(member: Any) -> str:
    """``integer_add`` for ``CU_ATOMIC_OPERATION_INTEGER_ADD``."""
    name: str = member.name
    return name.removeprefix("CU_ATOMIC_OPERATION_").removeprefix("CU_ATOMIC_CAPABILITY_").lower()


def _about(device: int, peer: int) -> AbstractContextManager[None]:
    return explained(_texts(device, peer))


def _texts(device: int, peer: int) -> dict[str, str]:
    """What the driver's refusals mean between two devices."""
    way = f"from device {device} to device {peer}"
    return {
        "CUDA_ERROR_INVALID_VALUE": f"{way}: this driver does not know what it was asked",
        "CUDA_ERROR_INVALID_DEVICE": f"{way}: there is no such link; name two different devices that are there",
        "CUDA_ERROR_INVALID_CONTEXT": f"{way}: the context of one of them is gone; was its driver closed or reset?",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": f"{way}: that memory is out of direct reach; copy it instead",
        "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": f"{way}: nothing is left to disable; each enable is undone once",
        "CUDA_ERROR_TOO_MANY_PEERS": f"{way}: {too_many_peers(device)}",
        "CUDA_ERROR_MAP_FAILED": f"{way}: the driver could not map that memory, as others report where BAR1 is small "
        "or an IOMMU is on; copy it instead",
    }
