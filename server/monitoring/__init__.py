"""What operators see of a broker: the log of who did what, metrics, and a page.

:class:`~cubroker.server.monitoring.observer.LedgerObserver` watches the ledger from the broker's loop; ``http``
and ``metrics`` run on a thread of their own, and are loaded only where metrics are on. Imported by the broker and
``main``.
"""
