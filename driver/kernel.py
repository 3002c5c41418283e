"""Kernels of this package: PTX that the driver compiles for the device when it is loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cubroker.driver.context import Context
    from cubroker.driver.stream import Stream

HERE = Path(__file__).parent
"""Where the PTX is."""


class Kernel:
    """One entry of a PTX file, loaded into a context; the caller closes it, before the context is let go.

    Args:
        context: where it is loaded.
        file: the name of the file in this package.
        entry: the name of the entry, all of whose arguments have 64 bits.

    Raises:
        DriverError: the driver cannot compile it for this device.
    """

    def __init__(self, context: Context, file: str, entry: bytes) -> None:
        self._context = context
        self._calls = calls = context.calls
        text = (HERE / file).read_bytes() + b"\0"
        with context.current():
            self._module = calls.cuModuleLoadData(text)
            try:
                self._function = calls.cuModuleGetFunction(self._module, entry)
            except BaseException:
                calls.cuModuleUnload(self._module)
                raise

    def launch(self, stream: Stream, blocks: int, threads: int, *arguments: int) -> None:
        """Start it in a stream of its context, with so many blocks of so many threads each."""
        parameters = arguments, (ctypes.c_uint64,) * len(arguments)
        with self._context.current():
            self._calls.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, parameters, 0)

    def close(self) -> None:
        """Unload it; to be called once, when nothing that was launched is under way."""
        with self._context.current():
            self._calls.cuModuleUnload(self._module)
