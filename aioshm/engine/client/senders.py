"""Who may speak for which engine at a client's sockets: no I/O."""

from __future__ import annotations

from collections.abc import Container

from aioshm.engine.protocol.payloads import Frame, check_stranger
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.errors import CodecError
from aioshm.zeromq.endpoint import host_of


class Senders:
    """Takes messages from those who may send them alone."""

    def __init__(self, protection: Protection, input_address: str, output_address: str) -> None:
        self._protection = protection
        self.register_by_keys: bool = protection.encrypts(input_address)
        self._send_by_keys = protection.encrypts(output_address)
        self._open_to_all = over_tcp([output_address]) and not self._send_by_keys
        hosts = {host_of(input_address), host_of(output_address)}
        self._same_route = len(hosts) == 1 and "" not in hosts  # an engine connects to both from one address

    def check(self, frames: list[Frame], origin: str, hosts: Container[str]) -> int | None:
        """Return the rank of the engine that has sent a message, if its keys tell."""
        if self._open_to_all:
            if self._same_route and origin not in hosts:
                raise CodecError(f"it comes from {origin}, and no engine does")
            check_stranger(frames)
        if not self._send_by_keys:
            return None
        sender = self._protection.ranks.get(origin)
        if sender is None:
            raise CodecError(f"the keys of engine {origin.partition('.')[0]} are void: that incarnation is dead")
        return sender
