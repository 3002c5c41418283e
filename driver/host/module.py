"""The host driver as a whole, in the shape of the module ``cuda.bindings.driver``.

Its functions take and return what the bindings' own do: their structs and enums, and tuples that
begin with a ``CUresult``. They imitate what GPUs were seen to do; where a GPU's behaviour is
undefined, they refuse.
"""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.devices import Devices
from cubroker.driver.host.ipc import Ipc
from cubroker.driver.host.kernels import Kernels
from cubroker.driver.host.peers import Peers
from cubroker.driver.host.streams import Streams
from cubroker.driver.once import keep_first


class HostModule(Devices, Streams, Ipc, Peers, Kernels):
    """All functions of the host driver; structs, enums and constants are those of the bindings."""

    emulated = True
    """It is no real hardware; see :mod:`cubroker.driver.guard`."""

    def forked(self) -> None:
        """In a forked child: be usable no more, if the parent used it. What that had mapped stays readable."""
        if self.initialised_by:
            self.initialised_by = 0  # nobody's, so that it stays refused

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(cuda, name)
        raise AttributeError(f"the host driver has no {name}")


_modules: dict[tuple[int, int, int], HostModule] = {}


def host_module(count: int, size: int, island: int) -> HostModule:
    """Return the driver of such devices (see ``State``): one per process, as there is one CUDA driver."""
    key = count, size, island
    return keep_first(_modules, key, lambda: _made(*key), lambda _: None)


def _made(count: int, size: int, island: int) -> HostModule:
    module = HostModule(count, size, island)
    os.register_at_fork(after_in_child=module.forked)
    return module
