"""The command line, the only package that may import both the server and the client.

Only ``python -m cubroker`` imports it.

:mod:`~cubroker.cli.main` has the table of subcommands, each in a module that is imported when it runs.
"""
