"""The messages between broker and clients, as typed structs.

Two channels carry the messages. On the *session socket* (Unix, SOCK_SEQPACKET) the client sends :class:`Hello`, the
broker answers with a :data:`Greeting`, and afterwards only the broker sends: each packet is a :data:`Notice`. On the
*request socket* (ZeroMQ, through the gateway) each request is an :class:`Envelope` and each reply an :class:`Answer`;
clients skip empty messages.

Every struct of this module travels as an array of its fields in their order; the first element of a :class:`Message`
is its tag, the name of its class. The structs of :mod:`~cubroker.protocol.status` travel as maps by field name. A field
that is added later comes last, has a default, and is listed in ``ADDED`` (:func:`~cubroker.protocol.wire.for_version`).

Units: sizes are bytes, times are seconds, ``wait`` is how long a request may wait before it fails with ``timeout``.
Bounds: the types in :mod:`~cubroker.protocol.fields`. A ``version`` of 0 in a request means the current version.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from msgspec import Meta, Struct

from cubroker.protocol.fields import (
    MAX_DESCRIPTORS,
    MAX_DEVICES,
    MAX_ITEMS,
    MAX_RECEIVED,
    Algorithm,
    Devices,
    DigestsOfReplica,
    Encoded,
    EventHandle,
    Handles,
    Identifier,
    Mode,
    Name,
    Natural,
    Peers,
    Plan,
    Seconds,
    User,
    Users,
    Uuid,
)
from cubroker.protocol.layout import MAX_ALLOCATIONS
from cubroker.protocol.status import BlockInfo, ClientInfo, DeviceInfo, Line, PoolInfo, SharingInfo, WaiterInfo

VERSIONS = (1, 2, 3, 4, 5, 6)  #: Protocol versions that this build speaks, oldest first.
CHOOSES = 2  #: The first version in which the broker chooses what a :class:`Create` leaves open: share, durability.
OWNED = 3  #: The first version in which :class:`Attach` and :class:`Where` name acceptable owners.
FINDS = 4  #: The first version that has :class:`Find`.

AUTHENTICATED = 4
"""The first version in which a session's secret does not travel with its requests: :mod:`cubroker.protocol.wire`."""

DIGESTS = 4  #: The first version with :class:`SealDigested` and :class:`ListDigests`.
TIES = 5
"""The first version whose builds all let a tensor of a layout have several names; the first builds of 4 refuse it."""

IN_PLACE = 5  #: The first version with :class:`SetLayout` and :class:`SealInPlace`.
LOCKS = 5  #: The first version with :class:`Lock` and :class:`Unlock`.
ENDS = 5  #: The first version in which :class:`PoolChanged` is also sent when a version that is not current has ended.
UPDATES = 5  #: The first version in which a :class:`Create` may have a :class:`Base`.
UNSEALED = 6  #: The first version in which an :class:`Attach` may be to a draft.
AUTO = "auto"  #: The share kind of a :class:`Create` that leaves the choice to the broker.
IPC = "ipc"  #: Share kind of memory that legacy IPC handles open; every mapping of it is writable.
VMM = "vmm"  #: Share kind of memory that descriptors or fabric handles open; a lease has one or the other.
MULTICAST = "multicast"  #: Share kind of memory whose replicas are bound to multicast objects; otherwise like ``vmm``.
SHARES = (IPC, VMM, MULTICAST)  #: All share kinds: those of the memory that a broker allocates.
BY_DESCRIPTOR = (VMM, MULTICAST)  #: Share kinds whose memory descriptors open.

DESCRIPTOR = b"descriptor"
"""Stands for the handle of ``vmm`` and ``multicast`` memory that has none: its descriptor is sent on the session
socket."""

_LISTED = Meta(max_length=MAX_ITEMS)


class Since(NamedTuple):
    """When a field was added to a message."""

    #: The first protocol version whose peers know the field.
    version: int
    #: Whether a peer that does not know the field misses nothing that it relies on.
    informs: bool = False


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of every member of a union; the tag is the class's name."""


class Digests(Struct, frozen=True, array_like=True):
    """The digests of a version's bytes at its seal."""

    #: The name of the digests' definition; that of this build is in :data:`cubroker.driver.kernels.ALGORITHM`.
    algorithm: Algorithm
    #: For each replica one digest per allocation; ``b""`` for an allocation that the replica does not have.
    replicas: Annotated[tuple[DigestsOfReplica, ...], Meta(max_length=MAX_DEVICES)]


# -- the session socket ----------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True):
    """Open a session, or ask whether the broker lends. Answer: :class:`Welcome`, :class:`Refused` or :class:`Pong`."""

    magic: Annotated[str, Meta(pattern=r"\Acubroker\Z")]
    #: The protocol versions that the client speaks.
    versions: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=32)]
    #: Whether the client wants a :class:`Pong` instead of a session.
    ping: bool = False


class Welcome(Message, frozen=True):
    """The session is open."""

    #: The newest version that both sides speak.
    version: Natural
    session: Identifier
    #: Authenticates every request, as described in :mod:`cubroker.protocol.wire`.
    secret: Annotated[bytes, Meta(min_length=16, max_length=16)]
    #: The driver that opens the broker's handles: ``cuda``, or ``host:…`` with the emulated devices.
    driver: str
    #: The user that the broker runs as; None from a broker that does not tell.
    uid: User | None = None

    ADDED: ClassVar = {"uid": Since(OWNED, informs=True)}


class Refused(Message, frozen=True):
    """The broker opens no session; it closes the connection."""

    #: As in :mod:`cubroker.protocol.errors`.
    code: str
    message: str


class Pong(Message, frozen=True):
    """The broker serves; it closes the connection."""

    version: Natural
    #: Why the broker lends nothing new now; empty if it does.
    obstacle: str


Greeting = Welcome | Refused | Pong


class PoolChanged(Message, frozen=True):
    """A watched pool has another current version; or the same one as before, and another version has ended."""

    name: str
    #: 0 if the pool has no current version any more.
    version: Natural


class GatewayChanged(Message, frozen=True):
    """The gateway was restarted: the client sends its unanswered requests again."""


class Farewell(Message, frozen=True):
    """The broker is shutting down."""

    reason: str


ENDING = "it was told to end"  #: The reason in :class:`Draining` of a broker that will not grant leases again.


class Draining(Message, frozen=True):
    """The broker grants no new leases, and the receiver should close its leases."""

    #: The reason, for people; empty if the broker grants leases again.
    why: str


class Descriptors(Message, frozen=True):
    """The next descriptors of a lease, as ``SCM_RIGHTS`` in the same packet; the receiver closes them.

    A lease has one descriptor for each :data:`DESCRIPTOR` among its handles, in the order of the answer's replicas and
    of the handles in each, then one for each multicast object of its :class:`Team`. Notices with them may arrive
    before or after the answer that grants the lease. A lease with fabric handles has one descriptor for each handle, in
    the same order, after its holder has sent :class:`SendDescriptors`.
    """

    lease: Identifier
    count: Annotated[int, Meta(ge=1, le=MAX_DESCRIPTORS)]
    #: How many descriptors precede these; a restarted broker may send some again.
    first: Natural = 0
    #: Whether they belong to the lease's last :class:`Rebound`, and ``first`` counts from there.
    rebound: bool = False


class PoolLost(Message, frozen=True):
    """The memory of a version that the receiver leases was lost with an earlier broker.

    The receiver's mappings stay valid, no other session gets the memory, and the leases are to be closed.
    """

    name: str
    version: Natural
    why: str


class Rebound(Message, frozen=True):
    """After a restart of the broker: how ``lease`` writes all replicas of its ``multicast`` version from now on.

    Descriptors that are ``rebound`` follow, those of ``replicas`` first, then those of the multicast objects. The
    receiver drops the earlier descriptors of both.
    """

    lease: Identifier
    #: The other replicas, if copies take the place of multicast and the version is published.
    replicas: Replicas
    #: With the sizes of the new multicast objects, if there are any.
    team: Team


Notice = PoolChanged | GatewayChanged | Farewell | Draining | Descriptors | PoolLost | Rebound | Welcome

# -- requests --------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """Lease a published version, or a draft to read it; waits until that exists. Answer: :class:`Attached`."""

    name: Name
    version: Natural
    #: None is the only device of a replicated pool, and all devices of a sharded pool.
    device: Uuid | None
    wait: Seconds
    #: Devices whose memory the client reaches, best first: the first with a replica serves if ``device`` has none.
    peers: Peers = ()
    #: Acceptable owners of the pool, in addition to the client's user; if empty, every owner is accepted.
    owners: Users = ()
    #: Whether ``version``, then not 0, may be a draft that has its memory, and that other users cannot write.
    unsealed: bool = False

    ADDED: ClassVar = {"owners": Since(OWNED), "unsealed": Since(UNSEALED)}


class Where(Struct, frozen=True, array_like=True):
    """The fields of :class:`Attach` that choose a version's memory."""

    device: Uuid | None
    peers: Peers = ()
    owners: Users = ()

    ADDED: ClassVar = {"owners": Since(OWNED)}


class Base(Struct, frozen=True, array_like=True):
    """What a new version shares with an earlier one of its pool, which is current or leased by the session.

    Both have the same devices, share kind and durability. Neither is ``multicast`` or writable by its readers.
    """

    #: The number of the earlier version.
    version: Identifier
    #: For each allocation of the new layout, the base's that it reuses, of the same size and device; None: it is new.
    allocations: Annotated[tuple[Natural | None, ...], Meta(max_length=MAX_ALLOCATIONS)]


class Create(Message, frozen=True):
    """Open a draft; waits for the client's turn as writer, and for room.

    Answer: :class:`Created`, or with ``attach`` :class:`Attached` as soon as the pool has a current version.
    """

    name: Name
    layout: Encoded
    devices: Devices
    #: The share kind; with :data:`AUTO` the broker chooses.
    share: Annotated[str, Meta(max_length=16)]
    wait: Seconds
    #: Where to attach instead, if the pool has a current version.
    attach: Where | None
    #: The pool's permissions from the publication on, like a file's; None keeps them, or sets the broker's default.
    mode: Mode | None = None
    #: For each allocation of a sharded pool, the index in ``devices`` of its device. None: the pool is replicated.
    plan: Plan | None = None
    #: Whether clients that attach may write the version and share events on it.
    writable: bool = False
    #: Whether the version survives a killed broker (``vmm`` and ``multicast``); None: if that is possible.
    durable: bool | None = None
    #: None if all its memory is new.
    base: Base | None = None

    ADDED: ClassVar = {"base": Since(UPDATES)}


class Seal(Message, frozen=True):
    """Publish a draft that its writer has unmapped. Answer: :class:`Sealed`."""

    lease: Identifier


class SealDigested(Seal, frozen=True):
    """Publish a draft, which is not ``writable``, with digests. Answer: :class:`Sealed`.

    A request of its own, since a broker refuses requests with fields that it does not know.
    """

    digests: Digests


class SealInPlace(Message, frozen=True):
    """Publish a draft that its writer cannot write any more, and keep its lease. Answer: :class:`Sealed`.

    The draft has a single replica, or is sharded. It is not ``multicast``.
    """

    lease: Identifier
    #: As in :class:`SealDigested`; None for a version without digests.
    digests: Digests | None = None


class SetLayout(Message, frozen=True):
    """Give a draft another layout of the same memory: as many allocations, of the same sizes. Answer: :class:`Done`."""

    lease: Identifier
    layout: Encoded


class Close(Message, frozen=True):
    """End a lease whose memory its holder has unmapped; an unsealed draft is discarded. Answer: :class:`Done`."""

    lease: Identifier


class SendDescriptors(Message, frozen=True):
    """Send descriptors for the fabric handles of a lease, which its holder cannot open, once. Answer: :class:`Done`.

    The descriptors are sent in :class:`Descriptors`.
    """

    lease: Identifier


class Cancel(Message, frozen=True):
    """Stop waiting for the request ``request``. Answer: :class:`Done`, after the answer to that request."""

    request: Identifier


class Retire(Message, frozen=True):
    """Take a version out of service. Answer: :class:`Retirement`."""

    name: Name
    version: Natural


class Watch(Message, frozen=True):
    """Send :class:`PoolChanged` now, with the state of ``name``, and at every change. Answer: :class:`Done`.

    Not to be confused with :class:`cubroker.client.notices.Watch`.
    """

    name: Name
    #: False ends the watch.
    on: bool


class Lock(Message, frozen=True):
    """Take the lock of a pool's name, which one session has at a time; waits for it in line. Answer: :class:`Locked`.

    It stays with the session until :class:`Unlock`, or the end of the session's process.
    """

    name: Name
    wait: Seconds


class Unlock(Message, frozen=True):
    """Release a lock; the next request in line gets it. Answer: :class:`Done`."""

    lock: Identifier


class Find(Message, frozen=True):
    """Ask for the current version of ``name``. Answer: :class:`Found`."""

    name: Name
    #: As in :class:`Attach`.
    owners: Users = ()


class ListPools(Message, frozen=True):
    """Answer: :class:`Pools`."""


class ListClients(Message, frozen=True):
    """Answer: :class:`Clients`."""


class ListDevices(Message, frozen=True):
    """Answer: :class:`DeviceList`."""


class Describe(Message, frozen=True):
    """Ask for a version's state and layout. Answer: :class:`Description`."""

    name: Name
    version: Natural


class ListDigests(Message, frozen=True):
    """Ask for a version's digests. Answer: :class:`DigestList`."""

    name: Name
    version: Natural


class Look(Message, frozen=True):
    """Ask for the whole state that the client may see, as of one moment. Answer: :class:`View`."""


class Tell(Message, frozen=True):
    """Ask for the last events of a pool or of a session. Answer: :class:`Story`."""

    #: None asks for ``session``.
    pool: Name | None
    session: Natural


class Drain(Message, frozen=True):
    """Grant no new leases from now on; only root and the broker's user may ask. Answer: :class:`Done`.

    Every client is sent :class:`Draining`.
    """

    #: False ends the draining.
    on: bool


class ShareEvent(Message, frozen=True):
    """Let every lease on the same version open an event of the client's. Answer: :class:`EventShared`.

    The event ends with its lease, or with :class:`DropEvent`.
    """

    #: On a published version that is writable.
    lease: Identifier
    name: Name
    #: The device whose work the event marks; the event is best opened there.
    device: Uuid
    handle: EventHandle


class OpenEvent(Message, frozen=True):
    """Ask for an event of the version that ``lease`` is on; waits until it is shared. Answer: :class:`EventOpened`."""

    lease: Identifier
    name: Name
    wait: Seconds


class Recorded(Message, frozen=True):
    """The client has recorded its event once more. Answer: :class:`Generation`."""

    event: Identifier


class AwaitEvent(Message, frozen=True):
    """Wait until an event was recorded more than ``after`` times. Answer: :class:`Generation`."""

    #: On the event's version.
    lease: Identifier
    event: Identifier
    after: Natural
    wait: Seconds


class DropEvent(Message, frozen=True):
    """The client has destroyed its event; requests that wait for it fail. Answer: :class:`Done`."""

    event: Identifier


Request = (
    Attach
    | Create
    | Seal
    | SealDigested
    | SealInPlace
    | SetLayout
    | Close
    | SendDescriptors
    | Cancel
    | Retire
    | Watch
    | Lock
    | Unlock
    | Find
    | ListPools
    | ListClients
    | ListDevices
    | Describe
    | ListDigests
    | Look
    | Tell
    | Drain
    | ShareEvent
    | OpenEvent
    | Recorded
    | AwaitEvent
    | DropEvent
)

LAST_WORDS = frozenset((Close, Seal, SealDigested, Unlock, Cancel, DropEvent))
"""Requests that give something back. A session may make them after its connection has ended. A broker without room for
another request ignores them instead of refusing them: the client sends them again until they are answered."""


class Envelope(Struct, frozen=True, array_like=True):
    """One request as it travels."""

    #: The session's secret up to version 3; empty from :data:`AUTHENTICATED` on.
    secret: Annotated[bytes, Meta(max_length=16)]
    #: One more than the id of the session's last new request; a request that is sent again keeps its id.
    id: Identifier
    #: The lowest id that is unanswered at the client: the broker may forget the answers to lower ids.
    oldest: Identifier
    body: Request
    #: Ids above ``oldest`` whose answers have arrived: the broker may forget these too.
    received: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_RECEIVED)] = ()


# -- answers ---------------------------------------------------------------------------------------


class ReplicaHandles(Struct, frozen=True, array_like=True):
    """What opens a version's memory on one device."""

    device: Uuid
    #: One per allocation of the layout: ``b""`` for an allocation that the device does not have, :data:`DESCRIPTOR`
    #: for one that a descriptor opens, else a legacy handle, or of ``vmm`` memory a fabric handle.
    handles: Handles


Replicas = Annotated[tuple[ReplicaHandles, ...], Meta(max_length=MAX_DEVICES)]


class Team(Struct, frozen=True, array_like=True):
    """How a writer's bytes reach all replicas of a ``multicast`` version."""

    #: ``multicast`` or ``copies``; empty while a restarted broker rebuilds the objects: :class:`Rebound` follows.
    how: str
    #: The reason for ``how``.
    why: str
    #: Sizes of the multicast objects, one per allocation, if the receiver may store through them. Their descriptors
    #: come after those of the replicas.
    sizes: Plan = ()


class Attached(Message, frozen=True):
    """A lease on a published version, or a reader's on a draft."""

    lease: Identifier
    name: str
    version: Natural
    share: str
    layout: Encoded
    #: The replica on the chosen device; of a sharded version all shards if the request named no device. The other
    #: replicas follow if the version is ``multicast`` and writable, and copies take the place of multicast.
    replicas: Replicas
    writable: bool = False
    team: Team | None = None


class Created(Message, frozen=True):
    """A draft; its receiver alone may write it, then seals or closes it. Others may attach to it meanwhile."""

    lease: Identifier
    name: str
    version: Natural
    #: The share kind that was chosen.
    share: str
    #: Memory that the version shares with its :class:`Base` has no handle here, and stays read-only.
    replicas: Replicas
    team: Team | None = None


class Sealed(Message, frozen=True):
    """The draft is published as ``version``."""

    version: Natural


class Done(Message, frozen=True):
    """The request is done."""


class Retirement(Message, frozen=True):
    """A version is retired."""

    version: Natural
    #: How many leases must end before its memory is freed.
    leases: Natural


class Locked(Message, frozen=True):
    """The number of a lock that the session has."""

    lock: Identifier


class Found(Message, frozen=True):
    """The current version."""

    #: 0 if there is none, or if the pool has another owner.
    version: Natural


class Pools(Message, frozen=True):
    """Every live version, by name and version."""

    pools: Annotated[tuple[PoolInfo, ...], _LISTED]


class Clients(Message, frozen=True):
    """Every session of the receiver's user, or of all users for an administrator, in order of arrival."""

    clients: Annotated[tuple[ClientInfo, ...], _LISTED]


class DeviceList(Message, frozen=True):
    """Every device of the broker, by index."""

    devices: Annotated[tuple[DeviceInfo, ...], _LISTED]


class Description(Message, frozen=True):
    """One version's state and layout."""

    info: PoolInfo
    layout: Encoded
    #: As in :class:`Create`; None if the version is replicated.
    plan: Plan | None = None
    #: Other live versions that share some of its memory, by number.
    shared: Annotated[tuple[SharingInfo, ...], _LISTED] = ()

    ADDED: ClassVar = {"shared": Since(UPDATES, informs=True)}


class DigestList(Message, frozen=True):
    """The digests of a version."""

    version: Natural
    #: The devices of the replicas.
    devices: Devices
    #: None if the version was sealed without digests.
    digests: Digests | None


class View(Message, frozen=True):
    """The state that the receiver may see, as of one moment."""

    devices: Annotated[tuple[DeviceInfo, ...], _LISTED]
    pools: Annotated[tuple[PoolInfo, ...], _LISTED]
    #: The sessions of the receiver's user, or of all users for an administrator; likewise ``waiters``.
    clients: Annotated[tuple[ClientInfo, ...], _LISTED]
    #: In the order in which they were promised.
    blocks: Annotated[tuple[BlockInfo, ...], _LISTED]
    waiters: Annotated[tuple[WaiterInfo, ...], _LISTED]


class Story(Message, frozen=True):
    """The last events of a pool or a session, oldest first."""

    lines: Annotated[tuple[Line, ...], _LISTED]


class EventShared(Message, frozen=True):
    """The number of a shared event."""

    event: Identifier


class EventOpened(Message, frozen=True):
    """An event that another process shared."""

    event: Identifier
    #: The device whose work the event marks.
    device: Uuid
    handle: EventHandle


class Generation(Message, frozen=True):
    """How often an event was recorded."""

    generation: Natural


class Failed(Message, frozen=True):
    """The request was refused."""

    #: As in :mod:`cubroker.protocol.errors`.
    code: str
    message: str


Reply = (
    Attached
    | Created
    | Sealed
    | Done
    | Retirement
    | Locked
    | Found
    | Pools
    | Clients
    | DeviceList
    | Description
    | DigestList
    | View
    | Story
    | EventShared
    | EventOpened
    | Generation
    | Failed
)


class Answer(Struct, frozen=True, array_like=True):
    """One reply as it travels."""

    #: The id of the request.
    id: Identifier
    body: Reply
