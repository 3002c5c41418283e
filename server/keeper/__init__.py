"""``cubroker keep``: the supervisor that holds a broker's descriptors and starts it again.

It must outlive the broker, so it is small: one thread, no asyncio, no code of the broker. Imports ``protocol``,
``server.hardening`` and the protocol of ``server.store.sd_notify``; imported by ``cli`` alone.
"""
