"""A driver made of host memory: the shape of ``cuda.bindings.driver``, and no GPU.

Bytes are shared between real processes. Any process of the same network namespace, whoever its
user, can open a handle whose 64 bytes it knows, and any process at all a descriptor that it was
given, as with a GPU; unlike there, a descriptor can be for reading alone. Memory that is freed while
others have it open stays theirs until they close it, and nothing is left on disk.
"""

from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.module import HostModule, host_module
from cubroker.driver.host.ranges import reopened

__all__ = ["BLOCK", "HostModule", "host_module", "reopened"]
