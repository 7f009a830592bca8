"""Runs one target under atheris until libFuzzer's own options end it: ``python -m tools.fuzz.one NAME [OPTION ...]``.

What branches Python takes is seen in the modules that decode, and in nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module

DECODERS = [
    "aioshm.codec.frames",
    "aioshm.codec.msgpack",
    "aioshm.engine.protocol",
    "aioshm.engine.security.keys",
    "aioshm.events.protocol",
    "aioshm.lifeline.dialer",
    "aioshm.lifeline.protocol",
    "aioshm.queue.handle",
    "aioshm.queue.names",
    "aioshm.queue.remote.wire",
    "aioshm.queue.tracing",
    "aioshm.ring.reference",
    "aioshm.ring.header",
    "aioshm.ring.slot",
]


def main() -> None:
    """Fuzz."""
    atheris = import_module("atheris")  # of Linux on x86-64 only, and installed for this alone
    with atheris.instrument_imports(include=DECODERS):
        from tools.fuzz.targets import TARGETS
    target = TARGETS[sys.argv.pop(1)]

    def run(data: bytes) -> None:
        target.run(data)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
