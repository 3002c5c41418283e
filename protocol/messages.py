"""What the two sides say to each other, as typed structs.

Two channels carry them. The *session socket* (Unix, SOCK_SEQPACKET) opens with :class:`Hello` and
:class:`Welcome`; afterwards the broker sends :data:`Notice` on it and the client sends nothing.
The *request socket* (ZeroMQ, through the gateway) carries one :class:`Envelope` per request and one
:class:`Answer` per reply; clients skip empty messages. Every struct of this module travels as
an array, and a union's first element is its tag. What :mod:`~cubroker.protocol.infos` describes travels as maps, by
the names of its fields.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from cubroker.protocol.bounds import (
    MAX_DESCRIPTORS,
    MAX_DEVICES,
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
from cubroker.protocol.infos import BlockInfo, ClientInfo, DeviceInfo, Line, PoolInfo, WaiterInfo
from cubroker.protocol.wire import MAX_ITEMS, prepare

VERSIONS = (1, 2, 3, 4)
"""Protocol versions that this build speaks, oldest first."""

CHOOSES = 2
"""The first version in which the broker chooses what a :class:`Create` leaves open: share kind and durability."""

OWNED = 3
"""The first version in which :class:`Attach` and :class:`Where` say whose pools do."""

FINDS = 4
"""The first version that has :class:`Find`."""

AUTHENTICATED = 4
"""The first version in which a session's secret does not travel with its requests: :mod:`~.authentication`."""

DIGESTS = 4
"""The first version with :class:`SealDigested` and :class:`ListDigests`."""

AUTO = "auto"
"""The share kind of a :class:`Create` that leaves it to the broker."""

DESCRIPTOR = b"descriptor"
"""The handle of ``vmm`` and ``multicast`` memory that no bytes open: a descriptor of it comes on the session socket."""


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that is one of several kinds; the tag is the class's name."""


class Digests(Struct, frozen=True, array_like=True):
    """What a version held when it was sealed: for each replica, in their order, one digest per allocation.

    ``b""`` stands for an allocation that the replica has not got. ``algorithm`` names the definition of all of them;
    that of this build is in :mod:`cubroker.driver.digest`.
    """

    algorithm: Algorithm
    replicas: Annotated[tuple[DigestsOfReplica, ...], Meta(max_length=MAX_DEVICES)]


# -- the session socket ----------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True):
    """A client's first words: the protocol versions that it speaks.

    With ``ping`` it wants no session, and only hears how the broker fares. Answer: :class:`Welcome`, or :class:`Pong`.
    """

    magic: Annotated[str, Meta(pattern=r"\Acubroker\Z")]
    versions: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=32)]
    ping: bool = False


class Welcome(Message, frozen=True):
    """The session is open.

    ``secret`` authenticates every request, as :mod:`~.authentication` says; ``driver`` says how to build the driver
    that opens the broker's handles: ``cuda``, or ``host:…`` with the emulated devices. ``uid`` is the user that the
    broker runs as; None: it does not say so.
    """

    version: Natural
    session: Identifier
    secret: Annotated[bytes, Meta(min_length=16, max_length=16)]
    driver: str
    uid: User | None = None


class Refused(Message, frozen=True):
    """There will be no session; the broker closes the connection after it."""

    code: str
    message: str


class Pong(Message, frozen=True):
    """The broker is here; ``obstacle`` is why it serves nobody new at the moment, or empty. It hangs up."""

    version: Natural
    obstacle: str


Greeting = Welcome | Refused | Pong


class PoolChanged(Message, frozen=True):
    """A watched pool has a new current version (0: it has none any more)."""

    name: str
    version: Natural


class GatewayChanged(Message, frozen=True):
    """The gateway was started again: requests that were not answered must be sent again."""


class Farewell(Message, frozen=True):
    """The broker is shutting down."""

    reason: str


class Draining(Message, frozen=True):
    """The broker lends nothing new, and the receiver is to give back what it holds; ``why`` is for people.

    Nothing for ``why``: it lends again.
    """

    why: str


class Descriptors(Message, frozen=True):
    """Here are the next ``count`` descriptors of ``lease``, as ``SCM_RIGHTS`` in the same packet.

    A lease has one for each :data:`DESCRIPTOR` among its handles: in the order of the replicas in the answer that
    grants it, and of the handles in each; then one for each multicast object of its
    :class:`Team`. They may come before that answer or after it, in several notices. The receiver closes them.
    A lease with fabric handles has one for each of these, in the same order, once it asks (:class:`SendDescriptors`).
    ``first`` is how many came before these: a broker that was started again may send some once more.
    Those that are ``rebound`` belong to the last :class:`Rebound` of the lease, and are counted from there.
    """

    lease: Identifier
    count: Annotated[int, Meta(ge=1, le=MAX_DESCRIPTORS)]
    first: Natural = 0
    rebound: bool = False


class PoolLost(Message, frozen=True):
    """The memory of a version of which the receiver has leases went with an earlier broker; ``why`` says how.

    What the receiver has mapped stays as long as it does; nobody else gets it, and the leases are to be closed.
    """

    name: str
    version: Natural
    why: str


class Rebound(Message, frozen=True):
    """The broker was started again: this is how ``lease`` writes all replicas of its ``multicast`` version from now on.

    ``team`` has the sizes of the new objects, if there are any. ``replicas`` are the others, where copies take the
    place of multicast and the lease is on a published version. Descriptors that are ``rebound`` follow, those of
    ``replicas``, then of the objects; what the lease had of both before is to be let go.
    """

    lease: Identifier
    replicas: Replicas
    team: Team


Notice = PoolChanged | GatewayChanged | Farewell | Draining | Descriptors | PoolLost | Rebound | Welcome

# -- requests --------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """Lease ``version`` of pool ``name`` (0: the current one) on ``device``.

    None is the only device of a replicated pool, and all devices of a sharded one. ``peers`` are other devices
    whose memory the asker can reach, best first: where ``device`` has nothing of the pool, the first of them that
    has is taken. ``owners`` are users one of whom has to own the pool, unless the asker does; without any, all do.
    Waits up to ``wait`` seconds for the version to be published. Answer: :class:`Attached`.
    """

    name: Name
    version: Natural
    device: Uuid | None
    wait: Seconds
    peers: Peers = ()
    owners: Users = ()


class Where(Struct, frozen=True, array_like=True):
    """Which memory of a version to lease, as in :class:`Attach`."""

    device: Uuid | None
    peers: Peers = ()
    owners: Users = ()


class Create(Message, frozen=True):
    """Open a draft of pool ``name``: without a ``plan`` replicated, each allocation of ``layout`` once per device.

    With a ``plan`` the pool is sharded: for each allocation, the index in ``devices`` of the one device where it lies.

    Waits up to ``wait`` seconds for its turn as the writer and for room. With ``attach`` it is
    answered like an attach, there, as soon as the pool has a current version.
    ``mode`` is the pool's from the publication on, like a file's; without it a pool keeps its mode, and
    a new one gets the broker's default. Whoever attaches to a ``writable`` version may write it, and make events on it.
    A ``durable`` one, which is ``vmm`` or ``multicast``, stays when the broker is killed and started again.
    The broker chooses the ``share`` that is :data:`AUTO`, and makes a version durable where it can if ``durable`` is
    None. Answer: :class:`Created`, or :class:`Attached`; both tell the share kind.
    """

    name: Name
    layout: Encoded
    devices: Devices
    share: Annotated[str, Meta(max_length=16)]
    wait: Seconds
    attach: Where | None
    mode: Mode | None = None
    plan: Plan | None = None
    writable: bool = False
    durable: bool | None = None


class Seal(Message, frozen=True):
    """The writer has unmapped the draft; publish it. Answer: :class:`Sealed`."""

    lease: Identifier


class SealDigested(Seal, frozen=True):
    """Seal a draft whose readers may not write it, and record its ``digests``. Answer: :class:`Sealed`.

    It is a request of its own, since a broker that does not know a field of a request refuses the request.
    """

    digests: Digests


class Close(Message, frozen=True):
    """The holder has unmapped and gives the lease back; an unsealed draft is discarded. Answer: :class:`Done`."""

    lease: Identifier


class SendDescriptors(Message, frozen=True):
    """The holder cannot open the fabric handles of its lease: send it descriptors of the same memory, once.

    Answer: :class:`Done`; the descriptors come as with the answer to an attach.
    """

    lease: Identifier


class Cancel(Message, frozen=True):
    """The caller no longer waits for its request ``request``. Answer: :class:`Done`, but not before that has come."""

    request: Identifier


class Retire(Message, frozen=True):
    """Take ``version`` of ``name`` (0: the current one) out of service. Answer: :class:`Retirement`."""

    name: Name
    version: Natural


class Watch(Message, frozen=True):
    """Send a :class:`PoolChanged` whenever ``name`` changes, beginning with its state now. Answer: :class:`Done`."""

    name: Name
    on: bool


class Find(Message, frozen=True):
    """Ask which version of ``name`` is current, if the pool is one of ``owners``' or the asker's.

    Without ``owners`` anybody's does. Answer: :class:`Found`.
    """

    name: Name
    owners: Users = ()


class ListPools(Message, frozen=True):
    """Answer: :class:`Pools`."""


class ListClients(Message, frozen=True):
    """Answer: :class:`Clients`."""


class ListDevices(Message, frozen=True):
    """Answer: :class:`DeviceList`."""


class Describe(Message, frozen=True):
    """Ask for the layout of ``version`` of ``name`` (0: the current one). Answer: :class:`Description`."""

    name: Name
    version: Natural


class ListDigests(Message, frozen=True):
    """Ask for the digests of ``version`` of ``name`` (0: the current one). Answer: :class:`DigestList`."""

    name: Name
    version: Natural


class Look(Message, frozen=True):
    """Ask for all that the broker knows and the sender may see, as of one moment. Answer: :class:`View`."""


class Tell(Message, frozen=True):
    """Ask for the last events of a pool, or without one of ``session``. Answer: :class:`Story`."""

    pool: Name | None
    session: Natural


class Drain(Message, frozen=True):
    """Lend nothing new from now on, if ``on``, else lend again: for root and the broker's user. Answer: :class:`Done`.

    Every client is sent :class:`Draining`.
    """

    on: bool


class ShareEvent(Message, frozen=True):
    """Let everybody with a lease on the same version open an event that the sender made, as ``name``.

    ``lease`` is on a published version that is writable; the event ends with it, or when it is dropped.
    ``handle`` opens it, best on ``device``. Answer: :class:`EventShared`.
    """

    lease: Identifier
    name: Name
    device: Uuid
    handle: EventHandle


class OpenEvent(Message, frozen=True):
    """Ask for the event ``name`` of the version that ``lease`` is on.

    Waits up to ``wait`` seconds for somebody to share it. Answer: :class:`EventOpened`.
    """

    lease: Identifier
    name: Name
    wait: Seconds


class Recorded(Message, frozen=True):
    """The sender has recorded its event once more. Answer: :class:`Generation`."""

    event: Identifier


class AwaitEvent(Message, frozen=True):
    """Wait up to ``wait`` seconds until an event was recorded more than ``after`` times.

    It is an event of the version that ``lease`` is on. Answer: :class:`Generation`.
    """

    lease: Identifier
    event: Identifier
    after: Natural
    wait: Seconds


class DropEvent(Message, frozen=True):
    """The sender's event is no more; whoever waits for it is told. Answer: :class:`Done`."""

    event: Identifier


Request = (
    Attach
    | Create
    | Seal
    | SealDigested
    | Close
    | SendDescriptors
    | Cancel
    | Retire
    | Watch
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

LAST_WORDS = frozenset((Close, Seal, SealDigested, Cancel, DropEvent))
"""Requests that give something back. A session may make them after its connection has ended, and a broker that has no
room for one more request lets them wait where it refuses others: they are sent again until they are answered."""


class Envelope(Struct, frozen=True, array_like=True):
    """One request as it travels.

    ``secret`` is the session's up to version 3, and empty from then on. ``id`` rises by one with every new request of a
    session, and stays when one is sent again. ``oldest`` is the lowest id still unanswered at the client: the broker
    may forget older answers. ``received`` are later ones whose answers came, so that one that waits for long does not
    keep those of all after it.
    """

    secret: Annotated[bytes, Meta(max_length=16)]
    id: Identifier
    oldest: Identifier
    body: Request
    received: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_RECEIVED)] = ()


# -- answers ---------------------------------------------------------------------------------------


class Replica(Struct, frozen=True, array_like=True):
    """A version's memory on one device: one handle per allocation of the layout, in its order.

    ``b""`` stands for an allocation that the device has not got, :data:`DESCRIPTOR` for one that a descriptor opens.
    Else they are legacy handles, or, of ``vmm`` memory, fabric handles, of all allocations of a version or of none.
    """

    device: Uuid
    handles: Handles


Replicas = Annotated[tuple[Replica, ...], Meta(max_length=MAX_DEVICES)]


class Team(Struct, frozen=True, array_like=True):
    """How bytes get to all replicas of a ``multicast`` version at once, for whoever may write it.

    ``how`` is ``multicast`` or ``copies``, or nothing while a broker that was started again puts the team together:
    then :class:`Rebound` follows. ``why`` says why. ``sizes`` are those of the multicast objects, one per
    allocation, if the receiver may store through them: their descriptors come after those of the replicas.
    """

    how: str
    why: str
    sizes: Plan = ()


class Attached(Message, frozen=True):
    """A lease on a published version.

    ``replicas`` is the one on the device that was chosen; of a sharded version, all if no device was named. Of a
    ``multicast`` version that is writable, and where copies take the place of multicast, the others follow.
    """

    lease: Identifier
    name: str
    version: Natural
    share: str
    layout: Encoded
    replicas: Replicas
    writable: bool = False
    team: Team | None = None


class Created(Message, frozen=True):
    """A draft, which its receiver alone may write, then seal or close."""

    lease: Identifier
    name: str
    version: Natural
    share: str
    replicas: Replicas
    team: Team | None = None


class Sealed(Message, frozen=True):
    """The draft is now ``version``."""

    version: Natural


class Done(Message, frozen=True):
    """There is nothing more to say."""


class Retirement(Message, frozen=True):
    """The retired version and how many leases it still waits for before its memory is freed."""

    version: Natural
    leases: Natural


class Found(Message, frozen=True):
    """The current version; 0: there is none, or the pool is another user's."""

    version: Natural


class Pools(Message, frozen=True):
    """Every live version, by name and version."""

    pools: Annotated[tuple[PoolInfo, ...], Meta(max_length=MAX_ITEMS)]


class Clients(Message, frozen=True):
    """Every session of the receiver's user, or of all users if that administers the broker, in order of arrival."""

    clients: Annotated[tuple[ClientInfo, ...], Meta(max_length=MAX_ITEMS)]


class DeviceList(Message, frozen=True):
    """Every device of the broker, by index."""

    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=MAX_ITEMS)]


class Description(Message, frozen=True):
    """What one version holds: its state, its layout, and if it is sharded the ``plan``, as of :class:`Create`."""

    info: PoolInfo
    layout: Encoded
    plan: Plan | None = None


class DigestList(Message, frozen=True):
    """The digests of a version, whose replicas are on ``devices``; None: it was sealed without."""

    version: Natural
    devices: Devices
    digests: Digests | None


class View(Message, frozen=True):
    """Everything as of one moment that the receiver may see. ``blocks`` are in the order in which they were promised.

    ``clients`` and ``waiters`` are those of the receiver's user, or of all users if that administers the broker.
    """

    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=MAX_ITEMS)]
    pools: Annotated[tuple[PoolInfo, ...], Meta(max_length=MAX_ITEMS)]
    clients: Annotated[tuple[ClientInfo, ...], Meta(max_length=MAX_ITEMS)]
    blocks: Annotated[tuple[BlockInfo, ...], Meta(max_length=MAX_ITEMS)]
    waiters: Annotated[tuple[WaiterInfo, ...], Meta(max_length=MAX_ITEMS)]


class Story(Message, frozen=True):
    """The last events of a pool or a session, the oldest first."""

    lines: Annotated[tuple[Line, ...], Meta(max_length=MAX_ITEMS)]


class EventShared(Message, frozen=True):
    """The number by which the event is known from now on."""

    event: Identifier


class EventOpened(Message, frozen=True):
    """An event that another process made. ``device`` is the one whose work it marks."""

    event: Identifier
    device: Uuid
    handle: EventHandle


class Generation(Message, frozen=True):
    """How often the event was recorded."""

    generation: Natural


class Failed(Message, frozen=True):
    """The request was refused; ``code`` as in :mod:`cubroker.protocol.errors`."""

    code: str
    message: str


Reply = (
    Attached
    | Created
    | Sealed
    | Done
    | Retirement
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
    """One reply as it travels, with the id of the request that it answers."""

    id: Identifier
    body: Reply


prepare(Greeting, Notice, Answer)  # those that a client reads, on any of its threads
