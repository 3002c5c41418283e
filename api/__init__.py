"""cubroker: a daemon that owns GPU memory and lends it to the processes of one host.

This is the root of the package, and the short way to its public names::

    from cubroker import Broker

    with Broker() as broker, broker.attach("llama") as pool:
        ...

A name is imported at its first use, so that ``import cubroker`` loads neither ZeroMQ nor CUDA nor numpy. The packages
below: ``protocol`` and ``driver`` (which import nothing else of ours), ``server`` and ``client`` (which never import
each other), ``integrations`` (on ``client`` alone) and ``cli`` (which may import everything).
"""

import os
import sys
from importlib import import_module

from cubroker.deprecated import RenamedModules
from cubroker.import_guard import ImportGuard

TYPE_CHECKING = False  # type checkers take it for true; to import `typing` would take longer than all the rest here
if TYPE_CHECKING:
    from cubroker.client.broker import Broker
    from cubroker.client.draft import Draft
    from cubroker.client.pool import Pool
    from cubroker.client.tensor import SharedTensor
    from cubroker.protocol.errors import (
        Corrupted,
        CubrokerError,
        Denied,
        DeviceFailure,
        Exists,
        InternalFailure,
        Invalid,
        NotFound,
        OutOfMemory,
        OverBudget,
        OverQuota,
        Retired,
        TimedOut,
        Unavailable,
        Unsupported,
    )
    from cubroker.protocol.layout import Layout, TensorSpec

    __version__: str

__all__ = [
    "Broker",
    "Corrupted",
    "CubrokerError",
    "Denied",
    "DeviceFailure",
    "Draft",
    "Exists",
    "InternalFailure",
    "Invalid",
    "Layout",
    "NotFound",
    "OutOfMemory",
    "OverBudget",
    "OverQuota",
    "Pool",
    "Retired",
    "SharedTensor",
    "TensorSpec",
    "TimedOut",
    "Unavailable",
    "Unsupported",
    "__version__",
]

_MODULES = {
    **dict.fromkeys(__all__, "protocol.errors"),
    "Broker": "client.broker",
    "Draft": "client.draft",
    "Pool": "client.pool",
    "SharedTensor": "client.tensor",
    "Layout": "protocol.layout",
    "TensorSpec": "protocol.layout",
}
"""The module of every public name."""

__path__ = [os.path.realpath(folder) for folder in __path__]  # a link on the way there may lead elsewhere later
if not any(isinstance(finder, ImportGuard) for finder in sys.meta_path):  # at a reload the first guard stays
    sys.meta_path.insert(0, ImportGuard(__name__, f"{__path__[0]}/__init__.py"))
    sys.meta_path.append(RenamedModules())


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    if name == "__version__":
        from importlib.metadata import version

        found: object = version("cubroker")
    elif name in _MODULES:
        found = getattr(import_module(f"cubroker.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
