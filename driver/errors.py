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
