"""``cubroker keep``: the supervisor that holds a broker's descriptors and starts it again.

What must outlive the broker is small: one thread, no asyncio, nothing of the broker. Imports ``protocol``,
``server.hardening`` and the protocol of ``server.store.sd_notify``; imported by ``cli`` alone.
"""
