"""Where a subscriber asks for batches that it has missed: a DEALER, which is there while something is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from aioshm.errors import OutOfDescriptors
from aioshm.events.protocol import wire
from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors
from aioshm.zeromq.curve import CurveKeys
from aioshm.zeromq.endpoint import attach, open_socket
from aioshm.zeromq.pump import Pump

logger: logging.Logger = logging.getLogger("aioshm.events")

# Requests that get no answer before a gap is given up; one only, while the replay port is known to be silent.
REPLAY_ATTEMPTS = 3
# ZeroMQ's own queue for replies: what a publisher may send ahead of this reader.
_REPLY_HWM = 64


class ReplayPort:
    """A publisher's replay port, as one subscriber asks there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str | None,
        curve: CurveKeys | None,
        timeout: float,
        work: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._curve = curve
        self._timeout = timeout
        self._work = work
        self._dealer: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None
        self._attempts = 0
        self._silent = False
        self._lacking: OutOfDescriptors | None = None
        self.endpoint = endpoint
        self.asked_at: float = 0.0  # when it was asked last, or has sent something, by the loop's clock
        self.failures: int = 0  # requests that got no answer in time

    @property
    def overdue_at(self) -> float:
        """When an answer is overdue; if nothing was asked yet, that time from now on."""
        asked = self._dealer is not None or self._lacking is not None
        return (self.asked_at if asked else self._loop.time()) + self._timeout

    @property
    def is_asked(self) -> bool:
        """Whether a request was sent whose answer has not ended."""
        return self._dealer is not None

    @property
    def has_answer(self) -> bool:
        """Whether something of an answer is there to be received."""
        return self._dealer is not None and bool(self._dealer.poll(0))

    def heard(self) -> None:
        """Note that the publisher is at it, or could not be: its time for an answer begins anew."""
        self.asked_at = self._loop.time()

    def receive(self, start: int) -> list[bytes] | None:
        """Return the next message of the answer to "all from ``start`` on", asked first; None: none is there."""
        if self._dealer is None:
            self._ask(start)
        if self._dealer is None:
            return None
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.asked_at = self._loop.time()
        return frames

    def _ask(self, start: int) -> None:
        assert self.endpoint is not None
        try:
            check_descriptors("asking for what was missed", 1 + SIGNAL_DESCRIPTORS)  # ZeroMQ would try again for ever
            self._dealer = dealer = open_socket(
                self._context, zmq.DEALER, self.endpoint, bind=False, hwm=_REPLY_HWM, curve=self._curve
            )
            attach(dealer, self.endpoint, bind=False)
        except OutOfDescriptors as error:
            if self._lacking is None:
                self._lacking = error
                self.heard()
            return
        self._lacking = None
        dealer.send_multipart(wire.request(start), zmq.NOBLOCK)
        self._pump = Pump(self._loop, dealer, self._work)
        self.heard()

    def ended(self) -> None:
        """Note that the answer is complete."""
        self.close()
        self._attempts = 0
        self._silent = False

    def give_up(self, asker: str) -> str | None:
        """Forget a request that is overdue; return why there will be no answer, once it was asked often enough."""
        self.close()
        self._attempts += 1
        self.failures += 1
        if self._attempts < (1 if self._silent else REPLAY_ATTEMPTS):
            return None
        reason = f"{self.endpoint} did not answer {self._attempts} times within {self._timeout} s"
        if self._lacking is not None:
            reason = f"{self.endpoint} was not asked: {self._lacking.strerror}"
        self._attempts = 0
        if not self._silent:
            logger.warning("subscriber %s: replay: %s", asker, reason)
        self._silent = True
        return reason

    def pause(self) -> None:
        """Leave the socket alone until `resume`."""
        if self._pump is not None:
            self._pump.pause()

    def resume(self) -> None:
        """Go on: the publisher could not have sent while nobody read."""
        self.heard()
        if self._pump is not None:
            self._pump.resume()

    def close(self) -> None:
        """Forget the request, if there is one."""
        self.pause()
        self._pump = None
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
