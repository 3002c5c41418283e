"""The configuration of a broker: ``schema`` declares every setting, ``load`` reads them from where they are set.

Imports what declares limits and defaults in ``ledger``, ``transport``, ``driver`` and ``protocol``; a declaration
touches no socket, event loop or device. Imported by ``server.main``, ``devices``, ``monitoring`` and ``cli``.
"""
