"""What operators see of a broker: the log of who did what, metrics, and a page.

:class:`~cubroker.server.monitoring.observer.LedgerObserver` watches the ledger from the broker's loop; ``http``
and ``metrics`` run on a thread of their own, and are loaded only where metrics are on. Imported by the broker and
``main``, and by the check of settings.
"""

from __future__ import annotations

from importlib import import_module

from cubroker.protocol.errors import Unsupported, needing


def obstacle() -> str:
    """Load what serves metrics; return why that cannot be, and what to install, or nothing.

    A package of the extra ``server`` may be missing. That is no reason not to lend memory: a broker serves without.
    """
    try:
        with needing("serving metrics, as metrics.listen says,", "cubroker[server]"):
            import_module("cubroker.server.monitoring.http")
    except Unsupported as error:
        return error.message
    return ""
