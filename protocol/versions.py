"""Messages as a peer of an earlier protocol version knows them.

A message travels as an array of its fields, and a peer refuses one with more fields than it knows. So a field that is
added is the last of its message, has a default, and stands in :data:`ADDED` with the first version that has it. A
message for a peer of an earlier version ends before that field. The sender makes sure that the field has its default
then: it asks the version first where the field would matter, and refuses what the peer cannot do.
"""

from __future__ import annotations

from msgspec import Struct

from cubroker.protocol.messages import OWNED, Attach, Message, Welcome, Where

ADDED: dict[type[Struct], tuple[tuple[str, int], ...]] = {
    Attach: (("owners", OWNED),),
    Where: (("owners", OWNED),),
    Welcome: (("uid", OWNED),),
}
"""The fields that were added to each message, in their order, and the version that each came with."""

NEWEST = max(since for added in ADDED.values() for _, since in added)
"""The first version whose peers know all of these."""

TOLD = frozenset({"uid"})
"""Those that only tell something: a peer that does not know them misses nothing that it relies on."""


def for_version(message: Struct, version: int) -> object:
    """Return what to encode for a peer that speaks ``version``: the message, or an array of the fields that it knows.

    Raises:
        AssertionError: the sender did not ask the version first, and the message needs a field that the peer lacks.
    """
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    shown = {name: for_version(value, version) if type(value) in ADDED else value for name, value in values.items()}
    for name, since in ADDED.get(type(message), ()):
        if version < since:
            del shown[name]
            assert name in TOLD or not values[name], f"{name} of {type(message).__name__} in version {version}"
    if shown.keys() == values.keys() and all(shown[name] is value for name, value in values.items()):
        return message
    return [type(message).__name__] * isinstance(message, Message) + list(shown.values())
