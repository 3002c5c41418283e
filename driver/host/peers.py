"""Peer access on host devices: which reach each other's memory, what their links can do, and who has access enabled."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

from typing import Any

from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.state import State

# All by number: the bindings have names for the last attribute, and for atomic operations, only since CUDA 13.0.
_PERFORMANCE_RANK, _ACCESS, _NATIVE_ATOMICS, _ARRAY_ACCESS, _ONLY_PARTIAL_NATIVE_ATOMICS = range(1, 6)
_LINK = {_PERFORMANCE_RANK: 0, _ACCESS: 1, _NATIVE_ATOMICS: 1, _ARRAY_ACCESS: 1, _ONLY_PARTIAL_NATIVE_ATOMICS: 0}
"""Between devices that reach each other, as between two H200s; between others all are 0."""

_OPERATIONS = range(13)
"""The atomic operations of 13.0, CU_ATOMIC_OPERATION_INTEGER_ADD to _FLOAT_MAX."""

_NO_FORM = 0
"""What two H200s answer for each operation (driver 580.159), although their link says that it has native atomics."""


class Peers(State):
    """The functions of peer access. It is enabled in one direction at a time, from one context to another."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._enabled: dict[tuple[int, int], tuple[int, int]] = {}  # the devices of two contexts

    @answers(1)
    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        device, peer = self.index(dev), self.index(peerDev)
        return int(device != peer and self.reaches(device, peer))

    @answers(1)
    def cuDeviceGetP2PAttribute(self, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
        linked = self._linked(srcDevice, dstDevice)
        if int(attrib) not in _LINK:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return _LINK[int(attrib)] if linked else 0

    @answers(1)
    def cuDeviceGetP2PAtomicCapabilities(
        self, operations: Any, count: int, srcDevice: Any, dstDevice: Any
    ) -> list[int]:
        self._linked(srcDevice, dstDevice)
        if not operations or count != len(operations) or any(int(item) not in _OPERATIONS for item in operations):
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return [_NO_FORM] * count

    @answers(0)
    def cuCtxEnablePeerAccess(self, peerContext: Any, Flags: int) -> None:
        device, peer = self.current(), self.device_of(peerContext)
        if Flags:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        if device == peer or not self.reaches(device, peer):
            raise Refusal(Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        pair = self.stack[-1], int(peerContext)
        with self.lock:
            if pair in self._enabled:
                raise Refusal(Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
            self.admit(device, peer)
            self._enabled[pair] = device, peer

    @answers(0)
    def cuCtxDisablePeerAccess(self, peerContext: Any) -> None:
        self.current()
        self.device_of(peerContext)
        pair = self.stack[-1], int(peerContext)
        with self.lock:
            if pair not in self._enabled:
                raise Refusal(Result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
            del self._enabled[pair]

    def peers(self, device: int) -> set[int]:
        """Return those of opened memory, and those to which access was enabled."""
        return super().peers(device) | {peer for near, peer in self._enabled.values() if near == device}

    def destroy(self, device: int) -> None:
        """End what the context of a device had enabled too, and what others had enabled to it."""
        super().destroy(device)
        self._enabled = {pair: devices for pair, devices in self._enabled.items() if device + 1 not in pair}

    def _linked(self, source: Any, target: Any) -> bool:
        device, peer = self.index(source), self.index(target)
        if device == peer:
            raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
        return self.reaches(device, peer)
