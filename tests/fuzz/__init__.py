"""Fuzzing of everything that reads what a peer or a file has written; see :mod:`tests.fuzz.__main__`."""
