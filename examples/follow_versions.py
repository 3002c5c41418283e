"""A worker that always has the newest version of a pool: it attaches to the new one, then closes the old one.

python examples/follow_versions.py NAME        # and meanwhile: cubroker load NAME PATH...

It ends when the pool has no current version.
"""

from __future__ import annotations

import sys

from cubroker import Broker, NotFound, Pool


def main(name: str) -> None:
    current: Pool | None = None
    with Broker() as broker, broker.watch(name) as versions:
        for version in versions:
            if version is not None:
                try:
                    fresh = broker.attach(name)
                except NotFound:  # retired since; the next change reports that
                    continue
                if current:
                    current.close()
                current = fresh
                print(f"{name}@{fresh.version}: {len(fresh)} tensors", flush=True)
            elif current:
                break
            else:
                print(f"waiting for {name}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
