"""The error of the driver layer, and explanations of refusals that several of its modules share."""

from __future__ import annotations


class DriverError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, status: int, name: str, detail: str = "") -> None:
        super().__init__(call, status, name, detail)
        #: The function, ``"cuMemAlloc"``.
        self.call = call
        #: Its ``CUresult`` as a number.
        self.status = status
        #: The name of that number, ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        self.name = name
        #: What was asked, or what to do about the refusal; may be empty.
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} failed with {self.name} ({self.status})" + (f": {self.detail}" if self.detail else "")

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had no room."""
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


def unmapped(device: int, *, host: bool) -> dict[str, str]:
    """Return explanations, by name of the result, of why a device could not map memory that it was to open.

    NVIDIA's pages list these results and give no cause of 205. Containers, BAR1 and IOMMU are causes that users of
    other projects report (docs/sharing.md). On host devices the cause is known.
    """
    return {
        "CUDA_ERROR_MAP_FAILED": _NO_ADDRESSES if host else _UNMAPPED,
        "CUDA_ERROR_TOO_MANY_PEERS": f"{too_many_peers(device)}, or attach where the memory is",
    }


def too_many_peers(device: int) -> str:
    """Return the explanation of a device's refusal to have one more peer."""
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
