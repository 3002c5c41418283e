"""The ledger, which is pure: events in and effects out, with no clock, no sockets and no device.

It imports only ``protocol``. Every other folder of the server except ``keeper`` and ``store`` may import it.
"""

from cubroker.server.ledger.ledger import Budget, HeldMemory, Impossible, Ledger, Limits

__all__ = ["Budget", "HeldMemory", "Impossible", "Ledger", "Limits"]
