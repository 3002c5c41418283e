"""Who runs the tests, as a system without an account of theirs has it, too: containers are given any number."""

from __future__ import annotations

import grp
import os
import pwd


def user_name() -> str:
    """The name of this process's user, or its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def group_name() -> str:
    """The name of this process's group, or its number."""
    try:
        return grp.getgrgid(os.getgid()).gr_name
    except KeyError:
        return str(os.getgid())
