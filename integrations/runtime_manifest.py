"""The manifest of a runtime pool: how the tensors of a module are put together again.

It is JSON in the tensor :data:`MANIFEST` of the pool. For each name of the module's tree it has the dtype, shape and
strides, the place of the bytes, and of a parameter the class and attributes. It says which names are one object, and
which are views of the same memory. Reading it needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cubroker.client.pool import Pool
from cubroker.protocol.errors import Invalid

MANIFEST = "cubroker:manifest"
"""The tensor of a runtime pool that contains the manifest."""

SOURCE = "cubroker:source"
"""The tensor of a runtime pool whose :data:`SOURCE_BYTES` bytes identify what a version was made from, or are zero."""

SOURCE_BYTES = 32
"""Bytes of that tensor, in every version, so that :func:`.runtime_pools.switch` can map one in place of another."""

FORMAT = 1
"""The format of the manifest; any other is refused."""

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"

Scalar = bool | int | str | None
Extent = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One name of a module's tree."""

    name: str
    #: ``parameter``, ``buffer`` or ``attribute``: a tensor that is neither, which a module has as an attribute.
    kind: str
    #: Names with the same number are one object.
    object: Extent
    #: As torch names it, without ``torch.``.
    dtype: str
    shape: tuple[Extent, ...]
    #: In elements.
    strides: tuple[Extent, ...]
    #: The pool's tensor that has the bytes; None for a tensor without elements.
    stored: str | None = None
    #: Where the tensor begins in ``stored``, in elements.
    offset: Extent = 0
    #: Whether each process has a copy.
    private: bool = False
    #: Whether it is private though no process was seen to write it, so that it gets a new version's values.
    constant: bool = False
    #: Whether it was in host memory.
    host: bool = False
    #: Of a buffer: whether it is part of the module's ``state_dict``.
    persistent: bool = True
    #: Whether a parameter requires a gradient, which compilers tell apart.
    gradient: bool = False
    #: The qualified name of a parameter's class.
    type: str = ""
    #: Attributes of a parameter that are truth values, whole numbers, strings or None.
    attributes: dict[str, Scalar] = {}
    #: Its other attributes, which are taken from the module that the pool is bound to.
    kept: tuple[str, ...] = ()


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a module is put together again."""

    format: int
    #: In the module's own order, which compilers use as the order of their arguments.
    entries: tuple[Entry, ...]
    #: Attributes of the module itself, which an engine sets as it loads.
    attributes: dict[str, Scalar] = {}
    #: Names that a new module has, and that post-processing has removed.
    consumed: tuple[str, ...] = ()


def read_manifest(pool: Pool) -> Manifest:
    """Return the manifest of a runtime pool.

    Raises:
        Invalid: ``pool`` is not a runtime pool, or its manifest has a format that this release does not know.
    """
    if MANIFEST not in pool:
        raise Invalid(
            f"pool {pool.name!r} is no runtime pool: it has no tensor {MANIFEST!r}; read its tensors without"
            f" runtime_pools"
        )
    data = pool[MANIFEST].tobytes()
    try:
        number = msgspec.json.decode(data, type=_Head).format
        if number == FORMAT:
            return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the manifest of runtime pool {pool.name!r} cannot be read: {error}") from None
    raise Invalid(
        f"the manifest of runtime pool {pool.name!r} has format {number}, and this release knows {FORMAT}; use the"
        f" release that published it, or publish it anew"
    )


class _Head(Struct):
    format: int


def read_source(pool: Pool) -> bytes:
    """Return the bytes that identify what a version was made from, as given to ``publish``; zeros if it has none."""
    told = SOURCE in pool and pool[SOURCE].nbytes == SOURCE_BYTES
    return pool[SOURCE].tobytes() if told else bytes(SOURCE_BYTES)


def difference(other: Manifest, manifest: Manifest) -> str:
    """Describe the first difference between two manifests, and how many names of tensors differ."""
    ours = {entry.name: entry for entry in manifest.entries}
    theirs = {entry.name: entry for entry in other.entries}
    if lone := sorted(ours.keys() ^ theirs.keys()):
        return f"only one of them has {some(lone)}"
    differing = [name for name in ours if ours[name] != theirs[name]]
    if not differing:
        return "the order of names, or attributes of the module itself"
    name = differing[0]
    field = next(each for each in Entry.__struct_fields__ if getattr(ours[name], each) != getattr(theirs[name], each))
    was, now = getattr(ours[name], field), getattr(theirs[name], field)
    return f"{field} of {name!r} is {now!r} there and {was!r} here, and {len(differing) - 1} more names differ"


def some(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(list(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "nothing"
