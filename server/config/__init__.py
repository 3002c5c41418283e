"""The configuration of a broker: ``schema`` declares every setting, ``load`` reads them from where they are set.

Imports the modules of ``ledger``, ``transport``, ``driver`` and ``protocol`` that declare limits and defaults, which
touches no socket, event loop or device. Imported by ``server.main``, ``devices``, ``monitoring`` and ``cli``.
"""

DEFAULT_DEVICES, DEFAULT_BUDGET = "cuda", "90%"  #: The defaults of two settings, for a command line that is read early.
