"""The devices' memory: allocated and freed on one thread per device, and compared with what processes map.

Imports ``driver``, ``protocol``, the ledger's events and rules, the queue, the store, and ``config``'s budgets;
imported by the broker, ``takeover`` and ``main``.
"""
