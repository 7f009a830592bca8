"""Strangers at every socket of the sandbox: noise, half greetings, others' greetings again, huge frames."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tools.campaign.attackers import CURVE_GREETING, NULL_GREETING, RAW, kept, speak
from tools.campaign.stage import Actor, Part
from tools.fuzz.targets import TARGETS

PER_SECOND = 20
KEPT_OPEN = 40
_TIMEOUT_S = 0.5
_LISTEN = "0A"  # the state of a TCP socket in /proc/net/tcp
_ACCEPTS = "00010000"  # the flag of a Unix socket that listens, in /proc/net/unix
_INPUTS = ("greetings", "signals", "handshake", "envelopes", "control", "frames")
"""Targets of fuzzing whose inputs are sent."""


def actors() -> list[Actor]:
    """Return who plays here."""
    return [Actor("strangers", "strangers:annoy", {}, 0.2)]


def places() -> Iterator[tuple[int, str | tuple[str, int]]]:
    """Yield family and address of everything that listens."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ACCEPTS and len(fields) > 7:
            yield socket.AF_UNIX, fields[7].replace("@", "\0", 1) if fields[7].startswith("@") else fields[7]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN:
            yield socket.AF_INET, ("127.0.0.1", int(fields[1].split(":")[1], 16))


async def annoy(part: Part) -> None:
    """Be one of them after the other, until the end."""
    chance, done = part.chance, Counter[str]()
    seeds = [each for target in TARGETS.values() if target.name in _INPUTS for each in target.inputs()]
    heard: deque[bytes] = deque(maxlen=200)  # what was said to one is said to another

    def say_again(sock: socket.socket) -> bytes:
        with suppress(TimeoutError):
            heard.append(sock.recv(4096))
        return chance.choice(heard or [b""])

    ways: dict[str, Callable[[socket.socket], bytes]] = {
        "seeds": lambda _: b"".join(chance.choices(seeds, k=chance.randrange(1, 4))),
        "seed": lambda _: chance.choice(seeds),
        "zmtp": lambda _: chance.choice((NULL_GREETING, CURVE_GREETING)) + chance.choice(seeds),
        "again": say_again,
    }
    while not part.stopping.is_set() and not part.calm:
        await asyncio.sleep(chance.uniform(0, 2 / PER_SECOND))
        found = list(places())
        if not found:
            continue
        family, address = chance.choice(found)
        way = chance.choice([*RAW, *ways])
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(_TIMEOUT_S)
            sock.connect(address)
            if way in RAW:
                speak(way, sock)
            else:
                sock.sendall(ways[way](sock))
                sock.close()
            done[way] += 1
        except OSError:
            done["refused"] += 1
        while len(kept) > KEPT_OPEN:
            kept.pop(0).close()
        if sum(done.values()) % PER_SECOND == 0:
            part.journal.note("strangers", sum(done.values()))
    while kept:
        kept.pop().close()
    part.journal.note("strangers", sum(done.values()))
    await part.stopping.wait()
