"""Where the command ``cubroker`` begins: signals are decided about before anything else is imported.

This module imports nothing but :mod:`cubroker.cli.signals`, which imports nothing but ``signal``.
"""

from __future__ import annotations

from cubroker.cli import signals


def main() -> None:
    """Run the command line, and exit with its status; the entry point of the console script."""
    signals.end_at_interrupt()
    signals.hold()
    from cubroker.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
