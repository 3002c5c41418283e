"""The broker: ledger, device memory, sessions, and the gateway that carries requests to it."""
