"""Who may do what: the one place where that is decided."""

from __future__ import annotations

ROOT = 0


def may_change(uid: int, owner: int | None, broker: int) -> bool:
    """Say whether ``uid`` may publish and retire versions of a pool that belongs to ``owner`` (None: to nobody).

    Its owner may, root may, and the user that the broker runs as. Everybody may attach.
    """
    return owner is None or uid in (owner, ROOT, broker)
