"""``python -m cubroker.cli`` is ``cubroker``."""

from cubroker.cli.main import main

main()
