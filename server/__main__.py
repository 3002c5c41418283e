"""``python -m cubroker.server DIRECTORY --devices host:2``: the broker without the command line around it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cubroker.protocol.errors import CubrokerError, explain
from cubroker.server import logs
from cubroker.server.transport import gateway_start


def main() -> int:
    """Serve until told to stop, and return the exit status: 1 if the broker cannot start."""
    parser = argparse.ArgumentParser(prog="python -m cubroker.server")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--config", type=Path, help="a TOML file; what is given here comes before it")
    parser.add_argument("--devices", help="cuda, cuda:0,1, host:2 or host:2@64MiB")
    parser.add_argument("--budget", help="of each device: 10GiB, or a share; 90%% by default")
    parser.add_argument("--drain", help="seconds to wait for leases to end when it is told to; 10 by default")
    options = parser.parse_args()
    ready = f"cubroker: serving on {options.directory}"
    with logs.to_standard_error() as say, gateway_start.in_advance() as gateway:
        from cubroker.server.main import configure, serve, stand_by

        try:
            given = {
                "directory": str(options.directory),
                "devices": options.devices,
                "budget": options.budget,
                "shutdown.drain_seconds": options.drain,
            }
            settings = {key: text for key, text in given.items() if text}
            handed = stand_by(options.config, settings)
            current = configure(options.config, settings)
            return serve(current, lambda: say(ready), handed, gateway)
        except CubrokerError as error:
            say(f"cubroker: {error.message}")
            return 1
        except OSError as error:
            say(f"cubroker: {explain(error)}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
