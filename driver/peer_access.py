"""Peer access: which devices reach each other's memory and how fast, and counted direct access from one to another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec

from cubroker.driver.checked_calls import Calls, DriverError, explained, tolerated, too_many_peers
from cubroker.driver.context import Device, PrimaryContext


class Link(msgspec.Struct, frozen=True):
    """What the driver says about the way from one device to another."""

    #: The ordinal of the device that reads and writes.
    device: int
    #: The ordinal of the device whose memory it is.
    peer: int
    #: Whether ``device`` reads and writes that memory directly.
    access: bool
    #: How fast, compared with this host's other links; 0 is the fastest.
    performance_rank: int
    #: Whether every atomic operation goes over the link.
    native_atomics: bool
    #: Whether CUDA arrays can be read and written too.
    array_access: bool
    #: Whether only some atomic operations go over the link; see :meth:`Peers.atomics`.
    only_partial_atomics: bool


class _Use(msgspec.Struct):
    """Direct access from one context to another."""

    #: Whether this module enabled it; if other code of the process did, it stays enabled.
    ours: bool
    count: int = 0


_uses: dict[tuple[Any, int, int], _Use] = {}
"""By driver-shaped module and ordinals: a process has one primary context per device, which all drivers share."""

_lock = threading.Lock()


class Peers:
    """The links between devices; see :attr:`Driver.peers`. Devices are named by ordinal. Any thread may call.

    If the driver refuses, every method raises a :class:`DriverError` that names the devices and the reason.
    """

    def __init__(self, calls: Calls, devices: Sequence[Device], context: Callable[[int], PrimaryContext]) -> None:
        self._calls = calls
        self._devices = tuple(device.index for device in devices)
        self._context = context
        self._held: Counter[tuple[PrimaryContext, PrimaryContext]] = Counter()

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
        """Return the forms in which the link does each atomic operation natively; an empty set means in none.

        Operations are named like ``integer_add`` and ``cas``, forms like ``signed`` and ``scalar_64``
        (``CUatomicOperation``, ``CUatomicOperationCapability``). Operations that the driver does not know
        are left out; a driver older than CUDA 13.0 knows none. Between two H200, driver 580.159 knows all of them
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

    def enable(self, context: PrimaryContext, peer: int) -> None:
        """Let the work of ``context`` use all memory allocated in the context of ``peer``; not the other way round.

        Each call needs its own :meth:`disable`, and access ends with the last one in this process. Access that
        other code of the process had enabled before is used, and left as it was. Memory opened by handle and memory
        mapped into a :class:`Reservation` do not need this.
        """
        other = self._context(peer)
        key = self._key(context, peer)
        with _lock:
            use = _uses.get(key) or _Use(ours=self._enabled(context, other))
            use.count += 1
            _uses[key] = use
            self._held[context, other] += 1

    def disable(self, context: PrimaryContext, peer: int) -> None:
        """Undo one :meth:`enable`, once the work that needs the access is done."""
        with _lock:
            for held, other in self._held:
                if held is context and other.device.index == peer:
                    return self._undo(context, other)
        code = self._calls.module.CUresult.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        raise DriverError("cuCtxDisablePeerAccess", int(code), code.name, _texts(context.device.index, peer)[code.name])

    def close(self) -> None:
        """Undo every remaining :meth:`enable`."""
        with _lock:
            for context, other in tuple(self._held.elements()):
                with suppress(DriverError):  # a context that a failed kernel has ruined refuses everything
                    self._undo(context, other)

    def _enabled(self, context: PrimaryContext, other: PrimaryContext) -> bool:
        """Enable access; return whether it was disabled before."""
        about = _about(context.device.index, other.device.index)
        with tolerated("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"), about, context.current():
            self._calls.cuCtxEnablePeerAccess(other.handle, 0)
            return True
        return False

    def _undo(self, context: PrimaryContext, other: PrimaryContext) -> None:
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

    def _key(self, context: PrimaryContext, peer: int) -> tuple[Any, int, int]:
        return self._calls.module, context.device.index, peer

    # -- questions ---------------------------------------------------------------------------------

    def _attribute(self, name: str, device: int, peer: int) -> int:
        attribute = getattr(self._calls.module.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        source, target = self._calls.cuDeviceGet(device), self._calls.cuDeviceGet(peer)
        return int(self._calls.cuDeviceGetP2PAttribute(attribute, source, target))

    def _only_partial(self, device: int, peer: int) -> bool:
        """Ask for the attribute, which bindings and drivers have since CUDA 13.0; False before."""
        with suppress(AttributeError), tolerated("CUDA_ERROR_INVALID_VALUE"):
            return bool(self._attribute("ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED", device, peer))
        return False

    def _capabilities(self, operation: Any, device: int, peer: int) -> frozenset[str] | None:
        """Return the forms of one operation; it is asked alone, as the driver refuses a list with an unknown one."""
        source, target = self._calls.cuDeviceGet(device), self._calls.cuDeviceGet(peer)
        with tolerated("CUDA_ERROR_INVALID_VALUE"):
            (bits,) = self._calls.cuDeviceGetP2PAtomicCapabilities([operation], 1, source, target)
            forms = self._calls.module.CUatomicOperationCapability
            return frozenset(_short(form) for form in forms if int(form) & bits)
        return None


def _short(member: Any) -> str:
    """``integer_add`` for ``CU_ATOMIC_OPERATION_INTEGER_ADD``."""
    name: str = member.name
    return name.removeprefix("CU_ATOMIC_OPERATION_").removeprefix("CU_ATOMIC_CAPABILITY_").lower()


def _about(device: int, peer: int) -> AbstractContextManager[None]:
    return explained(_texts(device, peer))


def _texts(device: int, peer: int) -> dict[str, str]:
    """Return explanations of refusals between two devices, by name of the result."""
    way = f"from device {device} to device {peer}"
    return {
        "CUDA_ERROR_INVALID_VALUE": f"{way}: this driver does not know what it was asked",
        "CUDA_ERROR_INVALID_DEVICE": f"{way}: there is no such link; name two different devices that are there",
        "CUDA_ERROR_INVALID_CONTEXT": f"{way}: the context of one of them is gone; was its driver closed or reset?",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": f"{way}: that memory is out of direct reach; copy it instead",
        "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": f"{way}: nothing is left to disable; each enable is undone once",
        "CUDA_ERROR_TOO_MANY_PEERS": f"{way}: {too_many_peers(device)}",
        "CUDA_ERROR_MAP_FAILED": f"{way}: the driver could not map that memory; users of other projects report this "
        "with a small BAR1 or an IOMMU that is on; copy it instead",
    }
