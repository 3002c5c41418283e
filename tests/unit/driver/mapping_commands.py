"""What a second process does with memory that is shared by descriptor; :class:`OtherProcess` passes the orders on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cubroker.driver import Context, Driver, DriverError, Physical, Reservation


class MappingCommands:
    """It receives and sends descriptors over ``link``. Every order begins with the ordinal of a device."""

    def __init__(self, driver: Driver, link: socket.socket) -> None:
        self._driver = driver
        self._link = link
        self._lent: list[Physical] = []
        self._attached: dict[int, Reservation] = {}

    def lend(self, device: int, nbytes: int) -> None:
        """Create memory and send a descriptor of it."""
        self._lent.append(self._driver.create(device, nbytes))
        descriptor = self._lent[-1].export()
        socket.send_fds(self._link, [b"."], [descriptor])
        os.close(descriptor)

    def attach(self, device: int, nbytes: int, readonly: bool) -> int:
        """Map the memory of a descriptor that was sent; return the pointer."""
        descriptor = socket.recv_fds(self._link, 1, 1)[1][0]
        try:
            return self._map(device, nbytes, descriptor, readonly=readonly)
        finally:
            os.close(descriptor)

    def attach_fabric(self, device: int, handle: bytes, nbytes: int, readonly: bool) -> int:
        """Map the memory of a fabric handle; return the pointer."""
        return self._map(device, nbytes, handle, readonly=readonly)

    def lend_fabric(self, device: int, nbytes: int) -> bytes:
        """Create memory and return a fabric handle of it."""
        self._lent.append(self._driver.create(device, nbytes, fabric=True))
        return self._lent[-1].export_fabric() or b""

    def detach(self, _: int, pointer: int) -> None:
        """Undo one ``attach``."""
        self._attached.pop(pointer).close()

    def soil(self, device: int, kind: str) -> int:
        """As :func:`soil`."""
        return soil(self._driver, self._driver.context(device), kind)

    def fork(self, _: int) -> list[str]:
        """Return what the descriptors of a forked child are, and what its driver answers."""
        return in_child(lambda: "\n".join(self._seen())).split("\n")

    def end(self) -> None:
        """Give everything back."""
        for reservation in self._attached.values():
            reservation.close()
        for physical in self._lent:
            physical.release()
        self._link.close()

    def _map(self, device: int, nbytes: int, source: int | bytes, *, readonly: bool) -> int:
        reservation = self._driver.context(device).reserve(nbytes)
        try:
            reservation.map(source, readonly=readonly)
        except DriverError:
            reservation.close()
            raise
        self._attached[reservation.pointer] = reservation
        return reservation.pointer

    def _seen(self) -> list[str]:
        answers = []
        try:
            self._driver.create(0, 2 << 20)
        except DriverError as error:
            answers.append(error.name)
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of the list itself
                answers.append(str(entry.readlink()))
        return answers


def in_child(work: Callable[[], str]) -> str:
    """Return what a forked child found."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read().decode()
    os.wait()
    return found


def soil(driver: Driver, context: Context, kind: str) -> int:
    """Fill seven eighths of the free memory of a device with something and free it; return how many bytes that was."""
    nbytes = context.memory()[0] // 8 * 7 >> 21 << 21
    pointer, free = obtain(driver, context, kind, nbytes)
    with context.current():
        context.calls.cuMemsetD8(pointer, 0xA5, nbytes)
    assert context.read(pointer + nbytes - 3, 3) == b"\xa5" * 3
    free()
    return nbytes


def obtain(driver: Driver, context: Context, kind: str, nbytes: int) -> tuple[int, Callable[[], None]]:
    """Return a pointer to so much new memory of a kind, and what frees it."""
    if kind == "ipc":
        pointer = context.allocate(nbytes)
        return pointer, lambda: context.free(pointer)
    physical = driver.create(context.device.index, nbytes)
    descriptor = physical.export()
    reservation = context.reserve(nbytes)
    reservation.map(descriptor, readonly=False)
    os.close(descriptor)
    physical.release()
    return reservation.pointer, reservation.close
