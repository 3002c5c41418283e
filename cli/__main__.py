"""``python -m cubroker.cli`` is ``cubroker``."""

from cubroker.cli.entry import main

main()
