"""The configuration of a broker: every setting, where it may come from, and what all of them mean together.

``docs/configuration.md`` describes them, and ``deploy/cubroker.toml`` shows them with their defaults. What is wrong is
told with the place, the key, the value and what would be right, before anything is started.
"""

from cubroker.server.config.current import Current
from cubroker.server.config.kinds import Address
from cubroker.server.config.settings import DEFAULT_BUDGET, OTHERS, SETTINGS, Access, Budgets, Config, Log, Metrics
from cubroker.server.config.sources import DEFAULT, Effective, Sources, Value, Wrong

__all__ = [
    "DEFAULT",
    "DEFAULT_BUDGET",
    "OTHERS",
    "SETTINGS",
    "Access",
    "Address",
    "Budgets",
    "Config",
    "Current",
    "Effective",
    "Log",
    "Metrics",
    "Sources",
    "Value",
    "Wrong",
]
