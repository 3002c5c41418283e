"""A driver made of host memory: the shape of ``cuda.bindings.driver``, and no GPU.

Memory is shared between real processes. Any user and any process of the same network namespace can
open a handle whose 64 bytes it knows, as with a GPU.
"""

from __future__ import annotations

import functools
import os

from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.module import HostModule

__all__ = ["BLOCK", "HostModule", "host_module"]


@functools.cache
def host_module(count: int, size: int) -> HostModule:
    """Return the driver of ``count`` devices of ``size`` bytes: one per process, as there is one CUDA driver."""
    module = HostModule(count, size)
    os.register_at_fork(after_in_child=module.forked)
    return module
