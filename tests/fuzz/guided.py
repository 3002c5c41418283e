"""One target under atheris, whose inputs are led by which lines they reach; used if it is installed.

``python -m tests.fuzz.guided TARGET OPTIONS…``, the options being libFuzzer's; it ends the process.
"""

from __future__ import annotations

import sys

import atheris


def main() -> None:
    with atheris.instrument_imports(include=["cubroker"]):
        from tests.fuzz.protocol_targets import TARGETS
        from tests.fuzz.target import attempt

    program, name, *options = sys.argv
    target = TARGETS[name]
    atheris.Setup([program, *options], lambda data: attempt(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
