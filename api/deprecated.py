"""Old names of modules, which work for one more version. Importing one gives a module that forwards and warns."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

NEW = {
    "cubroker.client.dtypes": "cubroker.protocol.layout",
    "cubroker.client.events": "cubroker.client.synchronization",
    "cubroker.client.ipc_events": "cubroker.client.synchronization",
    "cubroker.client.loader": "cubroker.client.loading.loader",
    "cubroker.client.named_arrays": "cubroker.client.draft",
    "cubroker.client.process": "cubroker.client.fork_guard",
    "cubroker.client.replica": "cubroker.client.pool",
    "cubroker.client.sources": "cubroker.client.draft",
    "cubroker.client.torch": "cubroker.integrations.torch",
    "cubroker.client.transformers": "cubroker.integrations.transformers",
    "cubroker.client.update": "cubroker.client.delta",
    "cubroker.client.verify": "cubroker.client.loading.verify",
    "cubroker.integrations.runtime": "cubroker.integrations.runtime_pools",
    "cubroker.integrations.torch_mempool": "cubroker.integrations.torch",
    "cubroker.protocol.directory": "cubroker.protocol.paths",
    "cubroker.protocol.dtypes": "cubroker.protocol.layout",
    "cubroker.protocol.infos": "cubroker.protocol.status",
    "cubroker.protocol.limits": "cubroker.protocol.fields",
}

ELSEWHERE = {
    ("cubroker.client.dtypes", "torch_dtypes"): ("cubroker.client.arrays", "torch_dtypes"),
    ("cubroker.client.dtypes", "torch_names"): ("cubroker.client.arrays", "torch_names"),
    ("cubroker.client.replica", "AllocationHandle"): ("cubroker.client.memory.mapping", "AllocationHandle"),
    ("cubroker.client.replica", "TensorIndex"): ("cubroker.protocol.layout", "TensorIndex"),
    ("cubroker.integrations.runtime", "Obtained"): ("cubroker.integrations.engine_loader", "Obtained"),
    ("cubroker.integrations.runtime", "obtain"): ("cubroker.integrations.engine_loader", "obtain"),
    ("cubroker.protocol.dtypes", "NAMES"): ("cubroker.protocol.layout", "DTYPES_BY_NAME"),
    ("cubroker.protocol.dtypes", "named"): ("cubroker.protocol.layout", "dtype_named"),
    ("cubroker.protocol.infos", "NOBODY"): ("cubroker.protocol.status", "HIDDEN_ID"),
}
"""Names of an old module that are not in the module with its new name, or have another name there, and their places."""


class RenamedModules:
    """Finds the old names for ``import``. As the last entry of ``sys.meta_path`` it sees only what no other finder has.

    It has no base class of :mod:`importlib.abc`, whose import takes half as long as that of this package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load an old name; None for any other."""
        return ModuleSpec(fullname, self) if fullname in NEW else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Have ``import`` make the module as usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Have the module look names up in the module of its new name, or in the one that ``ELSEWHERE`` has."""
        old, new = module.__name__, NEW[module.__name__]
        module.__doc__ = f"Moved to ``{new}``."

        def getattr_(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            message = f"{old} is now {new}; the old name will be removed in the next version"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            place, known = ELSEWHERE.get((old, name), (new, name))
            return getattr(import_module(place), known)

        module.__getattr__ = getattr_  # type: ignore[method-assign]
