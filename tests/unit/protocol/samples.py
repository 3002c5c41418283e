"""Two of every message, with every optional part both there and not there."""

from __future__ import annotations

from typing import Any, get_args

from cubroker.protocol import Layout, fields, status
from cubroker.protocol import messages as m

SECRET = bytes(range(16))
LAYOUT = Layout.pack(
    [("model.norm.weight", "BF16", (64,)), ("scalar", "F32", ()), ("none", "U8", (0,)), ("tied", "F32", ())],
    slab=256,
    tied={"tied": "scalar"},
)
INFO = status.PoolInfo(
    "llama",
    3,
    "current",
    1024,
    3,
    "ipc",
    ("GPU-a", "GPU-b"),
    False,
    2,
    1000,
    100,
    0o640,
    False,
    True,
    "",
    "",
    "handle",
    published=1e9,
)
SHARDED = status.PoolInfo(
    "moe",
    1,
    "draft",
    1024,
    3,
    "vmm",
    ("GPU-a", "GPU-b"),
    False,
    1,
    1000,
    100,
    0o640,
    True,
    False,
    "",
    "",
    "",
    True,
    memory=8 << 20,
    shared=2 << 20,
)
CLIENT = status.ClientInfo(7, 4711, 1000, "connected", (status.LeaseInfo("llama", 3),), 64 << 20)
SEEN = status.ClientInfo(
    9,
    4713,
    1002,
    "connected",
    (status.LeaseInfo("llama", 4, 1e9),),
    process=status.ProcessInfo("vllm", "/system.slice/vllm.service", 1e9),
)
UNSEEN = status.ClientInfo(8, 4712, 1001, "detached", (), process=status.ProcessInfo("bash", None, 1e9))
DEVICE = status.DeviceInfo(0, "GPU-a", "NVIDIA H200", 150_754_820_096, 135_679_338_086, 8 << 30, 0)
BLOCK = status.BlockInfo("GPU-a", "llama", 3, "current", "held", 8 << 30, 1000)
SHARED = status.BlockInfo("GPU-a", "llama", 3, "current", "held", 8 << 30, 1000, (status.SharedBytes((3, 4), 2 << 30),))
WAITER = status.WaiterInfo(7, 4711, 1000, 12, "create", "llama", "room", 8 << 30, 1_763_779_200.5)
HANDLES = (bytes(64), b"h" * 64)
SHARDS = (m.ReplicaHandles("GPU-a", (m.DESCRIPTOR, b"")), m.ReplicaHandles("GPU-b", (b"", m.DESCRIPTOR)))

DIGESTS = m.Digests("cubroker-128-1", ((bytes(16), b""), (b"", bytes(range(16)))))

GREETINGS = (
    m.Welcome(1, 7, SECRET, "host:2@1048576"),
    m.Welcome(1, 1 << 62, SECRET, "cuda"),
    m.Refused("denied", "user 5 may not come in"),
    m.Pong(1, ""),
    m.Pong(1, "its gateway is being started again"),
)
NOTICES = (
    m.PoolChanged("llama", 2),
    m.PoolChanged("llama", 0),
    m.GatewayChanged(),
    m.Farewell("the broker stops"),
    m.Draining("it was told to end"),
    m.Draining(""),
    m.Descriptors(5, 1),
    m.Descriptors(5, fields.MAX_DESCRIPTORS),
    m.PoolLost("llama", 2, "it went with the broker"),
    m.Rebound(5, (), m.Team("multicast", "it works", (2 << 20,))),
    m.Rebound(5, SHARDS[:1], m.Team("copies", "no slots left")),
    m.Descriptors(5, fields.MAX_DESCRIPTORS, 32),
    m.Descriptors(5, 1, 0, rebound=True),
    m.Welcome(1, 7, SECRET, "host:2@1048576"),
)
REQUESTS = (
    m.Attach("llama", 0, None, 0.0),
    m.Attach("llama", 3, "GPU-a", 0.5),
    m.Attach("llama", 3, "GPU-a", 0.5, ("GPU-b", "GPU-c")),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "ipc", 0.0, None),
    m.Create("llama", LAYOUT.encode(), ("GPU-a", "GPU-b"), "vmm", 604_800.0, m.Where("GPU-b"), 0o640, (1, 0)),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "ipc", 0.0, m.Where(None), None, ()),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "ipc", 0.0, m.Where("GPU-b", ("GPU-a", "GPU-c"))),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "ipc", 0.0, None, 0o640, (0,), True),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), m.AUTO, 0.0, None, None, None, False, False),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "vmm", 0.0, None, durable=True),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "vmm", 0.0, None, base=m.Base(2, (1, None))),
    m.Create("llama", LAYOUT.encode(), ("GPU-a",), "vmm", 0.0, None, base=m.Base(2, (None, 0))),
    m.Seal(1),
    m.SealDigested(1, DIGESTS),
    m.SealDigested((1 << 63) - 1, m.Digests("x", ())),
    m.SealInPlace(1),
    m.SealInPlace(1, DIGESTS),
    m.SetLayout(1, LAYOUT.encode()),
    m.Close((1 << 63) - 1),
    m.SendDescriptors(5),
    m.Cancel(9),
    m.Retire("llama", 0),
    m.Watch("llama", True),
    m.Watch("llama", False),
    m.Lock("llama", 600.0),
    m.Unlock(3),
    m.Find("llama"),
    m.Find("llama", (0, 1001)),
    m.ListPools(),
    m.ListClients(),
    m.ListDevices(),
    m.Describe("llama", 1),
    m.ListDigests("llama", 0),
    m.Look(),
    m.Tell("llama", 0),
    m.Tell(None, 7),
    m.Drain(True),
    m.Drain(False),
    m.ShareEvent(5, "ready", "GPU-a", bytes(64)),
    m.OpenEvent(5, "ready", 0.5),
    m.Recorded(7),
    m.AwaitEvent(5, 7, 3, 30.0),
    m.DropEvent(7),
)
REPLIES = (
    m.Attached(5, "llama", 3, "ipc", LAYOUT.encode(), (m.ReplicaHandles("GPU-a", HANDLES),)),
    m.Attached(5, "llama", 3, "vmm", LAYOUT.encode(), SHARDS, True),
    m.Attached(5, "llama", 3, "multicast", LAYOUT.encode(), SHARDS, True, m.Team("multicast", "it works", (4, 2))),
    m.Created(6, "llama", 4, "ipc", (m.ReplicaHandles("GPU-a", HANDLES), m.ReplicaHandles("GPU-b", ()))),
    m.Sealed(4),
    m.Done(),
    m.Retirement(3, 0),
    m.Locked(3),
    m.Found(3),
    m.Pools((INFO, SHARDED)),
    m.Pools((SHARDED, INFO)),
    m.Pools(()),
    m.Clients((CLIENT,)),
    m.Clients((UNSEEN,)),
    m.Clients((SEEN,)),
    m.DeviceList((DEVICE,)),
    m.View((DEVICE,), (INFO, SHARDED), (CLIENT,), (BLOCK,), (WAITER,)),
    m.View((DEVICE,), (SHARDED, INFO), (UNSEEN,), (BLOCK,), (WAITER,)),
    m.View((DEVICE,), (INFO, SHARDED), (SEEN,), (BLOCK,), (WAITER,)),
    m.View((DEVICE,), (INFO, SHARDED), (SEEN,), (SHARED,), (WAITER,)),
    m.View((), (), (), (), ()),
    m.Story((status.Line(1.5, "its writer sealed it"),)),
    m.Description(INFO, LAYOUT.encode()),
    m.Description(SHARDED, LAYOUT.encode(), (1, 0)),
    m.Description(SHARDED, LAYOUT.encode(), (1, 0), (status.SharingInfo(2, 1, 2 << 20),)),
    m.DigestList(1, ("GPU-a", "GPU-b"), DIGESTS),
    m.DigestList(3, ("GPU-a",), None),
    m.EventShared(7),
    m.EventOpened(7, "GPU-a", bytes(64)),
    m.Generation(4),
    m.Failed("over_budget", "no room"),
)

# What is decoded, as which shape.
SAMPLES: tuple[tuple[Any, Any], ...] = (
    (m.Hello("cubroker", (1, 2)), m.Hello),
    (m.Hello("cubroker", (1, 2), ping=True), m.Hello),
    *((value, m.Greeting) for value in GREETINGS),
    *((value, m.Notice) for value in NOTICES),
    *((m.Envelope(SECRET, 12, 11, body, (13, 15)), m.Envelope) for body in REQUESTS),
    *((m.Answer(12, body), m.Answer) for body in REPLIES),
    (LAYOUT, Layout),
)
SHAPES = (m.Hello, m.Greeting, m.Notice, m.Envelope, m.Answer, Layout)


def label(sample: tuple[Any, Any]) -> str:
    value = sample[0]
    return type(getattr(value, "body", value)).__name__


def members(union: Any) -> set[type]:
    return set(get_args(union))
