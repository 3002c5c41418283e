"""``python -m cubroker`` is the command line ``cubroker``."""

from cubroker.cli.__main__ import main

if __name__ == "__main__":
    main()
