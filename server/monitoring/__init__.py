"""What operators see of a broker: the log of who did what, metrics, and a page.

:class:`~cubroker.server.monitoring.observer.LedgerObserver` watches the ledger from the broker's loop; ``http``
and ``metrics`` run on a thread of their own, and are loaded only if metrics are on. Imported by the broker and
``main``, and by the check of settings.
"""

from __future__ import annotations

from importlib import import_module

from cubroker.protocol.errors import Unsupported, needing


def obstacle() -> str:
    """Load the modules that serve metrics; return why that failed and what to install, or an empty text.

    A package of the extra ``server`` may be missing. The broker then lends memory without metrics.
    """
    try:
        with needing("serving metrics, as metrics.listen says,", "cubroker[server]"):
            import_module("cubroker.server.monitoring.http")
    except Unsupported as error:
        return error.message
    return ""
