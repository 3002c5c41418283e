"""A version that this process fills, up to its seal; and the arrays that are copied into its memory, or lie in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

from cubroker.client import digests
from cubroker.client.arrays import Array, Arrays
from cubroker.client.devices import context
from cubroker.client.memory.lease import LeaseHandle
from cubroker.client.memory.mapping import MAX_NAMED, LeasedMemory, Spot
from cubroker.client.pool import Pool, Replica
from cubroker.client.tensor import described
from cubroker.client.transport.requests import Steps, blocking, expect, flag
from cubroker.driver import Context, Driver
from cubroker.protocol.errors import CubrokerError, Invalid, TimedOut, Unavailable, Unsupported
from cubroker.protocol.layout import ALIGNMENT, BITS, Layout, TensorIndex, TensorSpec
from cubroker.protocol.messages import DIGESTS, IN_PLACE, MULTICAST, Digests, Done, Sealed, SealInPlace, SetLayout


class Draft(Pool):
    """The tensors of an unpublished version, which may be written: those of its first device, as a mapping.

    Leaving it without :meth:`seal` discards it. Its tensors end with it, sealed or discarded. Arrays and framework
    tensors made from them must be dropped before a seal. If any are left at a discard, the draft ends only when they
    and its tensors are gone. A draft that is sealed in place becomes a :class:`Pool` of the published version.

    Attributes:
        replicas: the tensors on each device, in the order in which the devices were given.
    """

    sealed = False

    def __init__(
        self, lease: LeaseHandle, mapped: LeasedMemory, index: TensorIndex, name: str, *, scratch: bool = False
    ) -> None:
        super().__init__(lease, mapped, index, name)
        self._scratch = scratch
        #: Digests of the memory that it shares with an earlier version, and has not mapped: by device and allocation.
        self.shared_digests: Mapping[Spot, bytes] = {}
        self._lay_out(mapped, index)

    @blocking
    def seal(
        self, *, layout: Layout | None = None, digest: bool | Digests = False, in_place: bool = False
    ) -> Steps[int]:
        """Publish the memory, on all devices, as the pool's current version; return the version's number.

        The memory is unmapped first. With ``in_place`` it stays mapped: this object becomes a pool of the version, and
        arrays and framework tensors made from the draft stay valid, at the same addresses. Nothing may write to them
        any more: the device refuses writes if it does so for readers (``protected``), and on a host device a write ends
        the process. This waits for work that was submitted to the devices.

        Args:
            layout: replaces the draft's layout, and has the same allocations: for tensors whose places were not known
                before, as from :meth:`layout_of`.
            digest: have each device compute a digest of its memory, padding included, and publish the digests as well,
                so that :meth:`Pool.check` finds later changes. That takes about as long as reading all memory once.
                Digests that were computed already (:func:`cubroker.client.digests.of_replicas`) are published as given.
            in_place: keep the memory mapped and leased; for drafts on one device or with a plan, not for ``multicast``.

        Raises:
            Invalid: arrays or framework tensors of the draft are in use (``in_place``: are held); the layout has other
                allocations; or the draft is published. The draft stays open.
            Unsupported: a digest of memory that its readers may write; the broker is too old for a digest, another
                layout or a seal in place; with ``in_place``, the draft has several replicas, or is ``multicast``. The
                draft stays open.
            OverQuota: the layout is longer than this user's quota allows; the draft stays open.
            DeviceFailure, OutOfMemory: a digest could not be computed, or the access could not be changed; the draft
                stays open.
            DeviceFailure: the memory could not be unmapped yet; the draft is not published, and is discarded once the
                memory is unmapped.
            Unavailable, TimedOut: the broker is gone or does not answer; the draft may or may not be published.
        """
        self._owner.check()
        self._memory()
        if self.sealed:
            raise Invalid(f"{self._label} is published already; create a new version instead")
        if not isinstance(layout, Layout | None):
            raise Invalid(
                f"{layout!r:.60} is no layout to seal {self._label} with; pass one, as layout_of() returns it"
            )
        given = digest if isinstance(digest, Digests) else flag(digest, "digest")
        compute = self._digesting(given) if given else None
        if in_place := flag(in_place, "in_place"):
            self._check_stays()
        yield from self._set_layout(self.layout if layout is None else layout)
        if in_place:
            return (yield from self._seal_in_place(compute))
        lease = self._lease
        with self._closing:
            mapped, seal, why = self._memory(), lease.seal, object()
            if compute:
                self._session.check_confirms()
                seal = partial(lease.seal_digested, compute, partial(mapped.take_back, why))
            if in_use := mapped.end(seal, why):
                raise Invalid(f"{self._label} is still in use: {in_use}; drop the arrays made from it, then seal")
        if compute:
            yield from lease.digested()
        self._drop()
        version = expect((yield from lease.confirm()), Sealed).version
        self.sealed = True
        return version

    def layout_of(self, source: object) -> Layout:
        """Return a layout whose tensors are arrays that lie in this draft's memory already, for :meth:`seal`.

        If one array has several names, as tied parameters have, it becomes one tensor with these names.

        Args:
            source: a mapping of names to arrays of any library, or an object with ``state_dict()``; as for
                :meth:`Broker.publish`.

        Raises:
            Invalid: an array, which the text names, lies elsewhere, has gaps, or does not begin at a multiple of 256
                bytes; two arrays overlap; or as :meth:`Broker.publish`.
        """
        self._owner.check()
        self._memory()
        return layout_in(self, describe(source, self._session.driver), self._label)

    def _lay_out(self, mapped: LeasedMemory, index: TensorIndex) -> None:
        self._index = index
        self.replicas = tuple(Replica(mapped, (place,), index) for place in mapped.places)
        #: The layout that the broker has; None while another one is being sent to it.
        self._told: Layout | None = index.layout

    def _set_layout(self, layout: Layout) -> Steps[None]:
        if layout == self._told:
            return
        self._session.require(IN_PLACE, self._label, "take another layout at the seal")
        layout.check()
        if layout.allocations != self.layout.allocations:
            why = Layout((), layout.allocations).difference(Layout((), self.layout.allocations))
            raise Invalid(f"the layout to seal {self._label} with does not fit its memory: {why}")
        self._told = None
        yield from self._session.ask(SetLayout(self._lease.number, layout.encode()), Done)
        self._lay_out(self._memory(), TensorIndex(layout))

    def _check_stays(self) -> None:
        self._session.require(IN_PLACE, self._label, "seal it in place", "seal it without in_place")
        shards = [number for replica in self.replicas for number in replica.allocations]
        if self.share == MULTICAST or len(set(shards)) < len(shards):
            raise Unsupported(
                f"{self._label} cannot be sealed in place: it is shared as {self.share}, with {len(self.replicas)}"
                f" replicas, and a pool has only one; seal it without in_place, and attach to it"
            )

    def _seal_in_place(self, compute: Callable[[], Digests] | None) -> Steps[int]:
        mapped, lease, asked = self._memory(), self._lease, False
        mapped.begin_publication()
        try:
            if not self._scratch:
                yield from self._session.confirm(lease.protect(readonly=True), f"write access to {self._label}")
            with self.allocation_views[0].hold():  # another thread may close the draft meanwhile
                body = SealInPlace(lease.number, compute() if compute else None)
            asked = True
            version = (yield from self._session.ask(body, Sealed)).version
        except BaseException as error:
            refused = isinstance(error, CubrokerError) and not isinstance(error, Unavailable | TimedOut)
            if refused or not asked:  # it is certainly not published
                writable = lease.protect(readonly=False)
                if refused:  # not after an interrupt, which must not be delayed
                    yield from self._session.confirm(writable, f"write access to {self._label}")
                mapped.end_publication(readonly=False)
            raise
        mapped.end_publication(f"pool {self.name!r} version {version}", readonly=not self._scratch)
        self.writable, self.protected, self.sealed = self._scratch, mapped.protected, True
        return version

    def _digesting(self, given: bool | Digests) -> Callable[[], Digests]:
        """Return a function that returns the digests, given or computed; it refers to none of the memory."""
        if self._scratch:
            raise Unsupported(
                f"{self._label} is writable by its readers, so a digest would not tell what it holds; seal it without a"
                f" digest"
            )
        self._session.require(DIGESTS, self._label, "keep a digest", "seal without a digest")
        if isinstance(given, Digests):
            return lambda: given
        uuids = [replica.memory_device.uuid for replica in self.replicas]
        pieces = [span for replica in self.replicas for span in replica.digest_ranges()]
        return partial(digests.sealing, self._label, uuids, pieces, self.layout, self.shared_digests)

    def _release(self) -> None:
        mapped = self._mapped
        if mapped and not self.sealed:
            mapped.end()
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        for replica in self.replicas:
            replica._drop()


# -- arrays by name ------------------------------------------------------------------------------------


def describe(source: object, driver: Driver) -> dict[str, Array]:
    """Describe the arrays that are to be published.

    Args:
        source: a mapping of names to arrays, or an object with ``state_dict()``, such as a model.
        driver: this process's driver of the broker's devices.

    Raises:
        Invalid: the source is neither, or empty; or something in it is not an array that can be read here.
        Unsupported: only numpy can read an array, and is not installed.
    """
    if not isinstance(source, Mapping) and callable(state_dict := getattr(source, "state_dict", None)):
        source = state_dict()
    if not isinstance(source, Mapping):
        raise Invalid(
            f"this {type(source).__name__} cannot be published: pass a mapping of names to arrays, or an object"
            f" that has state_dict(), such as a torch.nn.Module"
        )
    if not source:
        raise Invalid("there is nothing to publish: the mapping, or the state_dict, has no tensor")
    arrays: dict[str, Array] = {}
    context_of = cache(partial(_context, driver))
    for name, array in source.items():
        if not isinstance(name, str):
            raise Invalid(f"the name of a tensor has to be a str, and {name!r} is none; rename it")
        try:
            arrays[str.__str__(name)] = described(array, context_of)  # layouts cannot carry a subclass of str
        except (Invalid, Unsupported) as error:
            raise type(error)(f"cannot publish {name!r}: {error.message}") from error
    return arrays


def _context(driver: Driver, ordinal: int) -> Context:
    if driver.host:
        raise Invalid(
            f"it is on GPU {ordinal}, and the broker's devices are emulated in host memory; copy it to the host first"
        )
    return context(driver, ordinal)


def layout_in(memory: Replica, arrays: Arrays, label: str) -> Layout:
    """Return a layout of the same allocations, whose tensors are arrays that lie in them.

    Args:
        memory: the tensors of a draft, on one device or all shards.
        arrays: the arrays.
        label: the draft's name in messages.

    Raises:
        Invalid: an array, which the text names, cannot be a tensor where it is; or two arrays overlap.
    """
    specs, elsewhere = find_in(memory, arrays)
    if elsewhere:
        named = "; ".join(f"{name!r} {why}" for name, why in list(elsewhere.items())[:MAX_NAMED])
        more = f"; and {len(elsewhere) - MAX_NAMED} more" if len(elsewhere) > MAX_NAMED else ""
        raise Invalid(f"not all tensors lie in {label}: {named}{more}; make them there, or copy them into it")
    layout = Layout(tuple(specs[name] for name in arrays), memory.layout.allocations)
    layout.check()
    return layout


def find_in(memory: Replica, arrays: Arrays) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the places of those arrays that can be tensors where they are, and why each other array cannot."""
    views = zip(memory.allocations, memory.allocation_views, strict=True)
    places = [(view.pointer, view.nbytes, number) for number, view in views]
    specs: dict[str, TensorSpec] = {}
    elsewhere: dict[str, str] = {}
    for name, array in arrays.items():
        spec = _placed(name, array, places)
        if isinstance(spec, str):
            elsewhere[name] = spec
        else:
            specs[name] = spec
    return specs, elsewhere


def _placed(name: str, array: Array, places: list[tuple[int, int, int]]) -> TensorSpec | str:
    if array.dtype not in BITS:
        return f"is of type {array.dtype}, which pools lack"
    if 0 in array.shape:
        return TensorSpec(name, array.dtype, array.shape, 0, 0)
    pointer = array.pointer
    if pointer is None:
        return "has gaps, or is not in C order"
    for start, nbytes, number in places:
        offset = pointer - start
        if not 0 <= offset < nbytes:
            continue
        spec = TensorSpec(name, array.dtype, array.shape, number, offset)
        if offset + spec.nbytes > nbytes:
            return f"ends {offset + spec.nbytes - nbytes} bytes beyond the end of allocation {number}"
        if offset % ALIGNMENT:
            return f"begins at byte {offset} of allocation {number}, which is no multiple of {ALIGNMENT}"
        return spec
    return "lies in other memory"
