"""Triton Inference Server: inputs and outputs of requests in a scratch pool instead of in the requests.

::

    with broker.attach("io") as pool, register(pool, "http://127.0.0.1:8000") as regions:
        pool["X"].copy_from(samples)
        regions.infer("model", inputs={"X": "X"}, outputs={"Y": "Y"})
        pool["Y"]  # has the answer

On a GPU the server opens the memory of an ``ipc`` pool by CUDA IPC handle, as CUDA regions, and nothing is copied. It
opens system regions only by a name in ``/dev/shm``, which the memory of host devices does not have. For each allocation
of a host device a file of the same size is registered, and bytes are copied there and back.

The server keeps a region open until the region is unregistered or the server ends. :class:`Regions` holds the pool's
lease until then, even if the pool is closed before. A client that is killed leaves its regions registered. Every
registration begins with :func:`sweep`, which finds such regions by the process in their names. Until then the pool
should not be retired: the broker does not see the server's mapping, and would free the memory under it.

The module uses the extensions ``system_shared_memory`` and ``cuda_shared_memory`` of Triton's HTTP API.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import logging
import mmap
import os
import re
import socket
import weakref
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from io import BufferedReader, RawIOBase
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from cubroker.client import AllocationHandle
from cubroker.client.devices import synchronize
from cubroker.client.fork_guard import OwnerProcess
from cubroker.client.pool import Pool
from cubroker.client.tensor import SharedTensor
from cubroker.protocol.errors import CubrokerError, Invalid, OutOfMemory, TimedOut, Unavailable, Unsupported, explain
from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.messages import IPC

try:
    import numpy as np
except ImportError as error:
    raise ImportError(f"cubroker.integrations.triton needs numpy ({error}): pip install 'cubroker[numpy]'") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

URL = "http://127.0.0.1:8000"
"""Where a server listens by default."""

SYSTEM, CUDA = "systemsharedmemory", "cudasharedmemory"
"""The kinds of regions, as the API's paths name them."""

TYPES = {
    "BOOL": "BOOL",
    **{f"U{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "BF16",
    **{f"F{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""Triton's name of each dtype that it supports."""

FOLDER = Path("/dev/shm")
"""Where shm_open(3) finds shared memory by name."""

JSON = {"Content-Type": "application/json"}

_NAME = re.compile(r"cubroker-([0-9a-f]{1,16})-([1-9][0-9]{0,8})-([0-9]{1,20})-[0-9]{1,20}")
"""Names of regions: PID namespace, PID and start time of the process, and a counter. Other clients may register any
name; one with a number that no process can have is not ours."""

_numbers = itertools.count(1)


class Span(NamedTuple):
    """Where a tensor lies, in the order in which tritonclient's ``set_shared_memory`` takes it."""

    region: str
    nbytes: int
    offset: int


class Output(NamedTuple):
    """One output, stored in its tensor from the first byte on."""

    #: Triton's name of its type, which is the type of the tensor.
    datatype: str
    #: The shape of the output, which may be smaller than the tensor.
    shape: tuple[int, ...]


class _Sent(Struct):
    """One output in a reply."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Its elements; None if they are in shared memory.
    data: object = None


class _Reply(Struct):
    """The reply to an inference."""

    outputs: tuple[_Sent, ...]


Answer = Output
"""The old name of :class:`Output`; the next version removes it."""


def register(
    pool: Pool,
    url: str = URL,
    *,
    device_id: int | None = None,
    timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> Regions:
    """Register the memory of a pool with a running server; first sweep regions of processes that have ended.

    Args:
        pool: a ``writable`` one; on GPUs shared as ``ipc``.
        url: of the server's HTTP endpoint, on this host.
        device_id: the number of the pool's GPU in the server's process; by default that in this process.
        timeout: seconds that the server may take for a whole answer to any request except an inference.
        headers: sent with every request, such as that of ``--http-restricted-api``.

    Raises:
        Invalid: the pool is a draft, not writable, closed or asleep, or on several GPUs with one ``device_id``; ``url``
            is not a URL; or the server refused, for the reason in the message.
        Unsupported: the pool is on a GPU and not shared as ``ipc``.
        OutOfMemory: ``/dev/shm`` has no room for the files that are registered in place of a host device's memory.
        Unavailable, TimedOut: the server cannot be reached, or does not answer. The message names the regions that the
            server may keep.
    """
    _check(pool, device_id)
    server = _Server(url, timeout, headers or {})
    _sweep(server)
    registration = _Registration(server)
    try:
        for number in range(len(pool.allocations)):
            registration.add(pool, number, device_id)
    except BaseException as error:
        registration.abandoned = True
        try:
            registration.release()
        except CubrokerError as left:
            error.add_note(str(left))
        raise
    return Regions(pool, registration)


def sweep(url: str = URL, *, timeout: float = 10.0, headers: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Unregister the regions of processes that have ended; returns the names of the regions.

    Regions of processes in another PID namespace, such as another container, are left alone.

    Raises:
        Invalid, Unavailable, TimedOut: as :func:`register`.
    """
    return _sweep(_Server(url, timeout, headers or {}))


class Regions:
    """The memory of a pool, as regions of a server, and the requests that use them.

    The end of a ``with`` block unregisters them. If that fails while an error leaves the block, the error gets a note.
    They are also unregistered when this object is dropped, and at the interpreter's exit; failures are then logged.
    """

    def __init__(self, pool: Pool, registration: _Registration) -> None:
        self._pool = pool
        self._tensors = {each.name: each for each in pool.layout.tensors if each.allocation in pool.allocations}
        self._registration = registration
        weakref.finalize(self, registration.abandon).atexit = False  # the registration is released then

    def __repr__(self) -> str:
        return f"<Regions {', '.join(self.names) or 'none'} of {self._pool!r} at {self._registration.server.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            return self.close()
        try:
            self.close()
        except CubrokerError as failure:
            log.error("%s", failure)
            error.add_note(str(failure))
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """The regions that are registered, one for each allocation."""
        return self._registration.names

    def __getitem__(self, tensor: str) -> Span:
        """Return where a tensor of the pool lies: ``infer_input.set_shared_memory(*regions["X"])``.

        Raises:
            KeyError: the pool has no such tensor.
            Invalid: the regions are not registered any more.
        """
        return Span(self._region(tensor).name, self._tensors[tensor].nbytes, self._tensors[tensor].offset)

    def copy_in(self, *tensors: str) -> None:
        """Make the content of tensors visible to the server: on a GPU wait for submitted work, else copy the bytes.

        Raises:
            KeyError, Invalid: as for ``regions[tensor]``.
            DeviceFailure: work on the GPU has failed.
        """
        for tensor in tensors:
            self._region(tensor).copy_in(self[tensor])

    def copy_out(self, *tensors: str) -> None:
        """Copy what the server has stored to tensors; on GPUs do nothing, as it stores to the tensors themselves.

        Raises:
            KeyError, Invalid: as for ``regions[tensor]``.
        """
        for tensor in tensors:
            self._region(tensor).copy_out(self[tensor])

    def infer(
        self,
        model: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        *,
        version: str = "",
        timeout: float = 600.0,
    ) -> dict[str, Output]:
        """Run a model on inputs that are tensors of the pool; the server stores the outputs in tensors of the pool.

        Args:
            model: its name at the server.
            inputs: the tensor for each input of the model; its shape is that of the input.
            outputs: the tensor for each output to compute, at least one; the tensor must have room for the output.
            version: the model's; by default as the server chooses.
            timeout: seconds to wait for the answer. After a timeout the server may still write to the outputs.

        Returns:
            Type and shape of each output.

        Raises:
            KeyError: the pool has no such tensor.
            Invalid: no output is asked for; the server refused; an output is missing, is in the reply itself or has
                another type than its tensor; or as for ``regions[tensor]``.
            Unsupported: Triton lacks the dtype of a tensor.
            Unavailable, TimedOut: the server cannot be reached, or does not answer.
        """
        if not outputs:  # Triton would send all outputs in its reply
            raise Invalid(f"no output of model {model!r} is asked for; name one at least, and a tensor for it")
        body = {
            "inputs": [{**self._described(tensor), "name": name} for name, tensor in inputs.items()],
            "outputs": [
                {"name": name, "parameters": self._described(tensor)["parameters"]} for name, tensor in outputs.items()
            ],
        }
        self.copy_in(*inputs.values())
        path = f"models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
        reply = self._registration.server.call("POST", f"{path}/infer", body, timeout)
        answers = self._answers(reply, model, outputs)
        self.copy_out(*outputs.values())
        return answers

    def _answers(self, reply: object, model: str, outputs: Mapping[str, str]) -> dict[str, Output]:
        """Return type and shape of each requested output; raises ``Invalid`` unless all are in their tensors."""
        try:
            sent = {each.name: each for each in msgspec.convert(reply, _Reply).outputs}
        except msgspec.ValidationError as error:
            url = self._registration.server.url
            raise Invalid(f"the answer of {url} for model {model!r} is not one of Triton: {error}") from None
        answers = {}
        for name, tensor in outputs.items():
            if name not in sent:
                named = ", ".join(sent) or "no output"
                raise Invalid(
                    f"model {model!r} answers without {name}, and with {named}; ask for outputs that it makes"
                )
            datatype, shape, data = sent[name].datatype, sent[name].shape, sent[name].data
            if data is not None:
                raise Invalid(
                    f"model {model!r} answers with {name} in the reply, and not in tensor {tensor!r}: the server stores"
                    f" no outputs in shared memory"
                )
            if datatype != (wanted := TYPES[self._tensors[tensor].dtype]):
                raise Invalid(f"model {model!r} answers with {name} of {datatype}, and tensor {tensor!r} is {wanted}")
            answers[name] = Output(datatype, shape)
        return answers

    def close(self, *, ended: bool = False) -> None:
        """Unregister the regions, and give up the pool's lease; a second call retries what has failed.

        A server that refuses the connection may be ending, and may still use memory of a GPU that it has opened. For
        host devices it has opened only copies: these are then given up, with a line in the log.

        Args:
            ended: whether the caller knows that the server's process is gone, and its mappings with it.

        Raises:
            Unavailable, TimedOut, Invalid: regions stay registered; the message names them. The lease stays, too, while
                this object lives.
        """
        self._registration.release(ended=ended)

    def _region(self, tensor: str) -> _Region:
        return self._registration.region(self._tensors[tensor].allocation)

    def _described(self, tensor: str) -> dict[str, Any]:
        span, spec = self[tensor], self._tensors[tensor]
        if spec.dtype not in TYPES:
            raise Unsupported(f"Triton has no type for {spec.dtype}, that of {tensor!r}; it has {', '.join(TYPES)}")
        parameters: dict[str, Any] = {"shared_memory_region": span.region, "shared_memory_byte_size": span.nbytes}
        if span.offset:
            parameters["shared_memory_offset"] = span.offset
        return {"datatype": TYPES[spec.dtype], "shape": list(spec.shape), "parameters": parameters}


class _Registration:
    """The regions that this process has registered for one pool, without a reference to :class:`Regions`.

    It may outlive that object. Tracebacks keep frames alive, so no frame that raises refers to what keeps the memory
    leased.
    """

    def __init__(self, server: _Server) -> None:
        self.server = server
        #: Whether its owner is gone without closing it, so that the next sweep releases it.
        self.abandoned = False
        self._regions: dict[int, _Region] = {}
        self._owner = OwnerProcess()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self._regions.values())

    def region(self, allocation: int) -> _Region:
        self._owner.check()
        if allocation not in self._regions:
            raise Invalid(f"the pool is not registered with Triton at {self.server.url} any more; register it again")
        return self._regions[allocation]

    def add(self, pool: Pool, number: int, device_id: int | None) -> None:
        """Register the pool's allocation of this index, and keep it leased from now on."""
        path, body, mirror = self._prepare(pool.handles()[number], pool.allocation_views[number], device_id)
        with mirror.named() if mirror else nullcontext():
            self.server.call("POST", path, body)

    def _prepare(
        self, handle: AllocationHandle, view: SharedTensor, device_id: int | None
    ) -> tuple[str, dict[str, Any], _Mirror | None]:
        """Record a region, and return the request for it; a server that does not answer may have registered it."""
        name = f"cubroker-{_namespace():x}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        body: dict[str, Any] = {"byte_size": handle.nbytes}
        mirror = _Mirror(name, handle.nbytes) if _on_host(view) else None
        if mirror:
            body |= {"key": f"/{name}", "offset": 0}
        else:
            assert handle.handle is not None
            device = handle.device.index if device_id is None else device_id
            body |= {"raw_handle": {"b64": b64encode(handle.handle).decode()}, "device_id": device}
        region = self._regions[handle.allocation] = _Region(name, SYSTEM if mirror else CUDA, view, mirror)
        _registrations.add(self)
        return f"{region.path}/register", body, mirror

    def release(self, *, ended: bool = False) -> None:
        """Unregister all regions; an error says which of them are left, and why."""
        if not self._owner.here():
            return
        for allocation in list(self._regions):
            self._unregister(allocation, ended=ended)
            self._regions.pop(allocation, None)
        _registrations.discard(self)

    def abandon(self) -> None:
        """Release it if no caller can handle a failure: a failure is logged, and the release is tried again later."""
        self.abandoned = True
        try:
            self.release()
        except CubrokerError as error:
            log.error("%s", error)

    def _unregister(self, allocation: int, *, ended: bool) -> None:
        path, harmless = self._regions[allocation].path, ended or self._regions[allocation].mirror is not None
        try:
            self.server.call("POST", f"{path}/unregister")
        except CubrokerError as error:
            if isinstance(error, _NotListening) and harmless:
                log.warning("%s: %s has ended with it", error.message, path)
                return
            kind = Unavailable if isinstance(error, _NotListening) else type(error)
            raise kind(
                f"{error.message}; {', '.join(self.names)} may still be registered there: close the regions again when"
                f" it answers, call cubroker.integrations.triton.sweep after this process has ended, or end the server"
                f" and close them with ended=True; do not retire the pool before"
            ) from error


_registrations: set[_Registration] = set()
"""The registrations of this process that have regions."""


def _release_all() -> None:
    for registration in list(_registrations):
        registration.abandon()


atexit.register(_release_all)  # called before the function that ends sessions, which was registered earlier


class _Region(NamedTuple):
    """One allocation that is registered."""

    name: str
    kind: str
    #: All bytes of the allocation; the view keeps the memory mapped, and leased.
    view: SharedTensor
    #: The copy that the server has open instead; None if it has the memory itself.
    mirror: _Mirror | None

    @property
    def path(self) -> str:
        return f"{self.kind}/region/{self.name}"

    def copy_in(self, span: Span) -> None:
        if self.mirror:
            self.mirror.part(span)[:] = self._part(span)
        else:
            synchronize(self.view.context, f"waiting for work on {self.view.device.name}")

    def copy_out(self, span: Span) -> None:
        if self.mirror:
            self._part(span)[:] = self.mirror.part(span)

    def _part(self, span: Span) -> NDArray[Any]:
        return self.view.numpy()[span.offset : span.offset + span.nbytes]


class _Mirror:
    """Shared memory with a name, which is unlinked as soon as the server has opened it, so that no file stays."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._path = FOLDER / name
        self._nbytes = nbytes

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make the memory, and keep its name within a ``with`` block."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(fd, 0, self._nbytes)  # so that no access to it fails later
                self._bytes = np.frombuffer(mmap.mmap(fd, self._nbytes), np.uint8)
                yield
            finally:
                os.close(fd)
                self._path.unlink()
        except OSError as error:
            kind = OutOfMemory if error.errno in (errno.ENOSPC, errno.ENOMEM) else Unavailable
            raise kind(f"{self._nbytes} bytes of shared memory with a name cannot be made: {explain(error)}") from error

    def part(self, span: Span) -> NDArray[Any]:
        return self._bytes[span.offset : span.offset + span.nbytes]


class _NotListening(Unavailable):
    """Nothing listens at the server's address: the server is starting, is ending or has ended."""


class _Timed(RawIOBase):
    """The part of a connected socket that :mod:`http.client` uses, with one deadline for all its calls."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._socket, self._end = sock, end

    def _ready(self) -> socket.socket:
        if (seconds := self._end - monotonic()) <= 0:
            raise TimeoutError
        self._socket.settimeout(seconds)
        return self._socket

    def sendall(self, data: bytes) -> None:
        self._ready().sendall(data)  # the timeout is for all of it

    def makefile(self, mode: str) -> BufferedReader:
        return BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._ready().recv_into(buffer)

    def close(self) -> None:
        """Do nothing: http.client reads some answers after it has closed the connection."""


class _Server:
    """One server, by its HTTP API."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:  # an incomplete IPv6 address, or a port that is not a number
            host = ""
        if not host or parts.scheme not in ("http", "https") or " " in url or not (url.isascii() and url.isprintable()):
            raise Invalid(f"{url!r} is no address of a Triton server; write {URL}, with its own host and port")
        self.url = url.rstrip("/")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = dict(headers)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a request to a path below ``v2``, and return the decoded answer, None if it is empty.

        Raises:
            Invalid: the server refused, for the reason in the message; or the timeout is out of range.
            TimedOut: there was no answer in time.
            Unavailable: there was no answer; ``_NotListening`` if nothing listens.
        """
        seconds = self._timeout if timeout is None else timeout
        if not 0 < seconds <= MAX_WAIT:
            raise Invalid(f"a timeout of {seconds} seconds; it can be more than 0, up to {MAX_WAIT:g}")
        end = monotonic() + seconds
        connection = self._connection(self._host, self._port, timeout=seconds)
        try:
            connection.connect()
            with connection.sock as sock:
                connection.sock = _Timed(sock, end)
                text = b"" if body is None else json.dumps(body).encode()
                connection.request(method, f"{self._path}/v2/{path}", text, {**JSON, **self._headers})
                reply = connection.getresponse()
                data = reply.read()
        except TimeoutError:
            raise TimedOut(f"Triton at {self.url} has not answered {path} for {seconds:g} s") from None
        except ConnectionRefusedError as error:
            raise _NotListening(f"Triton at {self.url} does not listen: {explain(error)}") from None
        except (OSError, HTTPException) as error:
            raise Unavailable(f"Triton at {self.url} did not answer {path}: {explain(error)}") from error
        finally:
            connection.close()
        return self._read(path, reply.status, data)

    def _read(self, path: str, status: int, data: bytes) -> Any:
        try:
            found = json.loads(data) if data else None
        except ValueError:
            found = {"error": data[:200].decode(errors="replace")}
            status = max(status, 400)  # this answer is not Triton's
        if status >= 400:
            why = found.get("error", found) if isinstance(found, dict) else found
            raise Invalid(f"Triton at {self.url} refused {path} ({status}): {why}")
        return found


def _on_host(view: SharedTensor) -> bool:
    """Whether memory belongs to a host device: Triton opens such memory only by a name."""
    return view.context.host


def _check(pool: Pool, device_id: int | None) -> None:
    """Raise unless a server may keep the pool's memory open."""
    label = f"pool {pool.name!r} version {pool.version}"
    if not pool.sealed:
        raise Invalid(
            f"{label} is a draft, which ends with its process while a server would keep its memory open; seal it,"
            f" and register what attach returns"
        )
    if not pool.writable:
        raise Invalid(f"{label} is read-only, and a server may write to any registered memory; create it writable")
    if not all(map(_on_host, pool.allocation_views)) and pool.share != IPC:
        raise Unsupported(
            f"{label} is shared as {pool.share}, and Triton opens memory of a GPU by CUDA IPC handle alone; create it"
            f" with share={IPC!r}"
        )
    if device_id is not None and len(pool.devices) > 1:
        raise Invalid(f"{label} is on {len(pool.devices)} devices; leave device_id out, or attach to one shard")


# -- regions of processes that have ended ----------------------------------------------------------------


def _sweep(server: _Server) -> tuple[str, ...]:
    """See :func:`sweep`; also release what this process has abandoned there."""
    for registration in list(_registrations):
        if registration.abandoned and registration.server.url == server.url:
            registration.release()
    swept = []
    for kind in (SYSTEM, CUDA):
        for region in server.call("GET", f"{kind}/status"):
            if _has_ended(region["name"]):
                server.call("POST", f"{kind}/region/{region['name']}/unregister")
                swept.append(region["name"])
    if swept:
        log.info("unregistered what ended processes had left at %s: %s", server.url, ", ".join(swept))
    return tuple(swept)


def _has_ended(name: str) -> bool:
    """Whether a region is of a process of this namespace that has ended."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1], 16) != _namespace():
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        return _started(int(match[2])) != int(match[3])
    try:
        os.kill(int(match[2]), 0)  # it may only be hidden (proc(5), hidepid)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> int:
    """Return when a process started, in the kernel's ticks (proc_pid_stat(5), field 22); unique with the PID."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
