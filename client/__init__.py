"""What a worker imports: the broker, pools and their tensors.

The bridges to frameworks have modules of their own (``cubroker.client.torch``, ``cubroker.client.transformers``),
and so have the loader and the check of pools against files (``cubroker.client.loader``, ``cubroker.client.verify``).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cubroker.client.broker import Broker
    from cubroker.client.draft import Draft
    from cubroker.client.events import SharedEvent
    from cubroker.client.pool import Pool
    from cubroker.client.replica import Replica
    from cubroker.client.tensor import SharedTensor
    from cubroker.client.watch import Watch

__all__ = ["Broker", "Draft", "Pool", "Replica", "SharedEvent", "SharedTensor", "Watch"]

_MODULES = {
    "Broker": "broker",
    "Draft": "draft",
    "Pool": "pool",
    "Replica": "replica",
    "SharedEvent": "events",
    "SharedTensor": "tensor",
    "Watch": "watch",
}


def __getattr__(name: str) -> object:
    """Import a class with its first use: what only asks whether a broker serves needs neither ZeroMQ nor numpy."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
