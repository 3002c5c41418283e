"""Random histories for the ledger, checked after every step against a naive model of what it promises.

``python -m tests.simulation --seeds 200000`` runs many; the tests in this package run a few.
"""
