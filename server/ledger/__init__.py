"""The ledger: pure, events in and effects out, with no clock, no sockets and no device."""

from cubroker.server.ledger.ledger import Budget, Held, Impossible, Ledger, Limits

__all__ = ["Budget", "Held", "Impossible", "Ledger", "Limits"]
