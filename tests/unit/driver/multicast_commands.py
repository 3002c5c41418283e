"""What a second process does with multicast objects; :class:`OtherProcess` passes the orders on."""

from __future__ import annotations

import os
import socket

from cubroker.driver import Driver, Multicast, Window
from tests.unit.driver.mapping_commands import MappingCommands


class MulticastCommands(MappingCommands):
    """Its windows are named by their addresses."""

    def __init__(self, driver: Driver, link: socket.socket) -> None:
        super().__init__(driver, link)
        self._windows: dict[int, Window] = {}
        self._teams: list[Multicast] = []

    def make_team(self, _: int, devices: list[int], nbytes: int) -> None:
        """Make an object with memory of so many bytes on each device, and send descriptors of it and of each."""
        team = self._driver.multicast(devices, nbytes)
        memories = [self._driver.create(device, nbytes) for device in devices]
        descriptors = [team.export(), *(memory.export() for memory in memories)]
        for memory in memories:
            team.bind(memory)
        self._teams.append(team)
        socket.send_fds(self._link, [b"."], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def release_team(self, _: int) -> None:
        """Undo the last ``make_team``."""
        self._teams.pop().release()

    def open_window(self, device: int, nbytes: int) -> int:
        """Map the object of a descriptor that was sent; return the address."""
        descriptor = socket.recv_fds(self._link, 1, 1)[1][0]
        window = self._driver.context(device).window(nbytes)
        window.map(descriptor)
        os.close(descriptor)
        self._windows[window.pointer] = window
        return window.pointer

    def broadcast(self, _: int, pointer: int, source: int, offset: int, nbytes: int) -> None:
        """Store bytes at an offset of the window there."""
        self._windows[pointer].broadcast(source, pointer + offset, nbytes)

    def close_window(self, _: int, pointer: int) -> None:
        """Undo one ``open_window``."""
        self._windows.pop(pointer).close()

    def add_device(self, device: int) -> None:
        """Add a device to the object of a descriptor that was sent."""
        descriptor = socket.recv_fds(self._link, 1, 1)[1][0]
        calls = self._driver.context(device).calls
        kind = calls.module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = calls.cuMemImportFromShareableHandle(descriptor, kind)
        os.close(descriptor)
        calls.cuMulticastAddDevice(handle, calls.cuDeviceGet(device))
        calls.cuMemRelease(handle)

    def end(self) -> None:
        """Give everything back."""
        for window in self._windows.values():
            window.close()
        for team in self._teams:
            team.release()
        super().end()
