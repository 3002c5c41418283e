"""What a worker imports: the broker, pools and their tensors.

The bridges to frameworks are in ``cubroker.integrations``; the loader, and the check of pools against files, in
``cubroker.client.loading``. Imports ``driver`` and ``protocol``, never the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cubroker.client.broker import Broker
    from cubroker.client.draft import Draft
    from cubroker.client.follow import Follow
    from cubroker.client.memory.mapping import AllocationHandle
    from cubroker.client.notices import Watch
    from cubroker.client.pool import Pool, Replica
    from cubroker.client.synchronization import NameLock, SharedEvent
    from cubroker.client.tensor import SharedTensor

__all__ = [
    "AllocationHandle",
    "Broker",
    "Draft",
    "Follow",
    "NameLock",
    "Pool",
    "Replica",
    "SharedEvent",
    "SharedTensor",
    "Watch",
]

_MODULES = {
    "AllocationHandle": "memory.mapping",
    "Broker": "broker",
    "Draft": "draft",
    "Follow": "follow",
    "NameLock": "synchronization",
    "Pool": "pool",
    "Replica": "pool",
    "SharedEvent": "synchronization",
    "SharedTensor": "tensor",
    "Watch": "notices",
}


def __getattr__(name: str) -> object:
    """Import a class at its first use: code that only asks whether a broker serves needs neither ZeroMQ nor numpy."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
