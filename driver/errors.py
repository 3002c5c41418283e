"""What the driver layer raises where the driver refuses."""

from __future__ import annotations


class DriverError(Exception):
    """A driver call failed.

    Attributes:
        call: the function, ``"cuMemAlloc"``.
        status: its ``CUresult`` as a number.
        name: that number's name, ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        detail: what it was asked for, or what to do about it; may be empty.
    """

    def __init__(self, call: str, status: int, name: str, detail: str = "") -> None:
        super().__init__(call, status, name, detail)
        self.call = call
        self.status = status
        self.name = name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} failed with {self.name} ({self.status})" + (f": {self.detail}" if self.detail else "")

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had no room."""
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


def unmapped(device: int, *, host: bool) -> dict[str, str]:
    """Return what it means, by the name of the result, that a device was not given the memory that it asked to open.

    NVIDIA's pages list the results and name no cause of 205. Containers, BAR1 and IOMMU are what users of other
    projects report (docs/sharing.md); of host devices the cause is known.
    """
    return {
        "CUDA_ERROR_MAP_FAILED": _NO_ADDRESSES if host else _UNMAPPED,
        "CUDA_ERROR_TOO_MANY_PEERS": f"{too_many_peers(device)}, or attach where the memory is",
    }


def too_many_peers(device: int) -> str:
    """Return what it means that a device can have no more peers, and what to do."""
    return (
        f"device {device} has as many peers as it can have, of which other programs may hold some (by NVIDIA's pages 8 "
        "on systems without NVSwitch): close memory of other devices, disable access to them"
    )


_UNMAPPED = (
    "the driver could not map the memory, and NVIDIA names no cause; in a container, give it the owner's GPUs in the "
    "same way as the owner has them (`--gpus all`, NVIDIA_VISIBLE_DEVICES=all); for memory of another GPU, see that "
    "BAR1 is large and the IOMMU off, or attach where the memory is"
)
_NO_ADDRESSES = "this process has no addresses left for the memory: raise its limit on address space (`ulimit -v`)"
