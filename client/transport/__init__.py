"""The connection to a broker: handshake, requests, received descriptors.

Imports ``protocol``, and ``fork_guard`` and ``notices`` of ``client``; imported by the client's other modules.
"""
