"""Multicast objects over the memory of several devices, on a thread of their own: binding may wait.

Whatever refuses them, copies take their place, for all devices together: a pool is never refused for want of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from cubroker.driver import Driver, DriverError, Multicast
from cubroker.server.devices import DeviceMemory
from cubroker.server.ledger.entries import MULTICAST
from cubroker.server.ledger.events import Assemble, Assembled, Dissolve, Dissolved, Event
from cubroker.server.ledger.teams import COPIES
from cubroker.server.orders import Orders

log = logging.getLogger(__name__)

WORKS = "every device takes part"


class Object:
    """One multicast object, to which an allocation of every device is bound, and its descriptor."""

    def __init__(self, multicast: Multicast) -> None:
        self.nbytes = multicast.nbytes
        self._multicast = multicast
        self.descriptor = multicast.export()

    def close(self) -> None:
        """Close the descriptor, unbind the memory, release the object; no step is left out for another's failure."""
        try:
            os.close(self.descriptor)
        finally:
            self._multicast.release()


class Assembly(Orders[Assemble | Dissolve]):
    """All multicast objects of the broker, and the thread that makes and ends them.

    So a ``Dissolve`` that overtakes its ``Assemble`` in time still finds it done.

    Args:
        driver: the devices'; used on the thread alone.
        memory: the devices' memory, by UUID; of members it stays until their team is dissolved.
        report: takes what came of each request; called on the thread.
    """

    def __init__(self, driver: Driver, memory: Mapping[str, DeviceMemory], report: Callable[[Event], None]) -> None:
        self._driver = driver
        self._memory = memory
        self._report = report
        self._teams: dict[int, ExitStack] = {}
        self._left: set[int] = set()
        super().__init__("assembly")

    def leave(self, team: int) -> None:
        """Leave a team as it is when this closes: somebody uses its memory."""
        self._left.add(team)

    def _do(self, request: Assemble | Dissolve) -> None:
        if isinstance(request, Assemble):
            self._report(self._assemble(request))
        else:
            self._dissolve(request.team)
            self._report(Dissolved(request.team))

    def _give_all_back(self) -> None:
        for team in self._teams.keys() - self._left:
            self._dissolve(team)

    def _assemble(self, request: Assemble) -> Assembled:
        """Make all objects of a request, or none of them."""
        devices = [
            device.index for device in self._driver.devices for uuid, _ in request.members if device.uuid == uuid
        ]
        try:
            if why := self._obstacle(devices):
                return Assembled(request.team, COPIES, why)
            return self._obtain(request, devices)
        except DriverError as error:
            log.warning("multicast cannot be had for devices %s, copies take its place: %s", devices, error)
            return Assembled(request.team, COPIES, str(error))
        # A thread that ended here would leave this request and all later ones waiting for ever.
        except Exception as error:
            log.exception("%s failed in an unexpected way", request)
            return Assembled(request.team, COPIES, repr(error))

    def _obstacle(self, devices: Sequence[int]) -> str | None:
        return next((why for device in devices if (why := self._driver.multicast_obstacle(device))), None)

    def _obtain(self, request: Assemble, devices: Sequence[int]) -> Assembled:
        memory = [self._memory[uuid].physicals(ticket) for uuid, ticket in request.members]
        with ExitStack() as undo:
            objects = []
            for number, size in enumerate(request.sizes):
                with ExitStack() as half:
                    multicast = self._driver.multicast(devices, size)
                    half.callback(multicast.release)
                    for pieces in memory:
                        multicast.bind(pieces[number], keep=True)
                    objects.append(Object(multicast))
                    half.pop_all()
                undo.callback(objects[-1].close)
            self._teams[request.team] = undo.pop_all()
        sizes, descriptors = (tuple(getattr(each, name) for each in objects) for name in ("nbytes", "descriptor"))
        return Assembled(request.team, MULTICAST, WORKS, sizes, descriptors)

    def _dissolve(self, team: int) -> None:
        """Undo what there is of a team. What the driver refuses to undo is logged: nothing more can be done."""
        try:
            if (objects := self._teams.pop(team, None)) is not None:
                objects.close()
        except DriverError as error:
            log.error("team %d: %s", team, error)
        except Exception:  # as in assembling, the thread must go on
            log.exception("team %d: dissolving failed in an unexpected way", team)
