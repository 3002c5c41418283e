"""Calls of the host driver as tests make them, and what a process has open of it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.bindings import HostModule
from tests.unit.server.processes import files

Kind = cuda.CUmemAllocationHandleType
DESCRIPTOR = Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
OURS = "cubroker-device-"
"""The beginning of the names of devices' memory."""


def properties(device: int = 0, kind: Any = DESCRIPTOR) -> Any:
    found = cuda.CUmemAllocationProp()
    found.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device
    found.requestedHandleTypes = kind
    return found


def access(device: int, flags: Any = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE) -> Any:
    found = cuda.CUmemAccessDesc()
    found.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device
    found.flags = flags
    return found


def release(module: HostModule, *handles: Any) -> None:
    for handle in handles:
        value(module.cuMemRelease(handle))


def imported_again(module: HostModule, handle: Any) -> Any:
    """Another handle of what a handle stands for, by a descriptor."""
    descriptor = value(module.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))
    again = value(module.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR))
    os.close(descriptor)
    return again


def value(answer: tuple[Any, ...]) -> Any:
    """What a function answered when it succeeded."""
    assert answer[0] == cuda.CUresult.CUDA_SUCCESS, answer[0]
    return answer[1] if len(answer) > 1 else None


def held() -> Counter[str]:
    """What this process has open, and which memory of devices it has mapped; compare as answers of :func:`files`."""
    mappings = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if OURS in line)
    return files(os.getpid()) + Counter(f"mapping of {path} {number}" for *_, number, path, _ in mappings)
