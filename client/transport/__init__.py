"""The connection to a broker: handshake, requests, received descriptors.

Imports ``protocol``, and of ``client`` what tells processes and notices apart; imported by the client's other modules.
"""
