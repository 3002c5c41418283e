"""The broker: ledger, device memory, sessions, and the gateway that carries requests to it.

It imports ``driver`` and ``protocol``, and never ``client``. Only ``cli`` imports it.
"""
