"""The broker: ledger, device memory, sessions, and the gateway that carries requests to it.

Imports ``driver`` and ``protocol``; ``cli`` alone imports it, and never the client.
"""
