"""How clients reach the broker: the session socket, sessions, requests, replies, and the gateway process.

Imports ``protocol``, the ledger and its events, the queue, the store, and ``driver.system_calls``. Imported by the
broker, ``main`` and ``takeover``; ``config``, ``monitoring`` and ``cli`` import its helpers for sockets and
credentials.
"""
