"""The ledger: pure, events in and effects out, with no clock, no sockets and no device.

Imports ``protocol`` alone; every other folder of the server but the keeper and the store may import it.
"""

from cubroker.server.ledger.ledger import Budget, HeldMemory, Impossible, Ledger, Limits

__all__ = ["Budget", "HeldMemory", "Impossible", "Ledger", "Limits"]
