"""The ways in: the session socket, sessions, requests, replies, and the gateway process.

Imports ``protocol``, the ledger and its events, the queue, the store, and ``driver.system_calls``. Imported by the
broker, ``main`` and ``takeover``; its helpers for sockets and credentials by ``config``, ``monitoring`` and ``cli``,
too.
"""
