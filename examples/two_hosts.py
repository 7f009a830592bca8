"""One writer, a reader beside it and a reader on another host.

On the first host (its address is what the other one reaches it by), then, with the file that it writes, on the second:

    python examples/two_hosts.py serve 10.0.0.5 handle.json
    scp handle.json second-host: && ssh second-host python examples/two_hosts.py read handle.json

Without arguments both run here, over the loopback interface. Whoever has the file can read everything that is sent and
is believed by the other readers' writer: it is a password, and written so that only its owner can read it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from aioshm import Handle, MessageQueue, PeerDied

LOCAL, REMOTE = 0, 1
STEPS = 5


def write_secret(file: Path, text: str) -> None:
    """Write a file that only its owner can read, and that is there whole or not at all."""
    part = file.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text)
    part.rename(file)


async def serve(address: str, file: Path) -> None:
    """Send to both readers; the local one runs in this process to keep the example short."""
    async with MessageQueue(n_reader=2, n_local_reader=1, connect_ip=address) as mq:
        handle = mq.export_handle()
        write_secret(file, handle.to_json())
        print(f"serving on {address}; the remote reader needs {file.name}", flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read("local", handle, LOCAL))
            await mq.wait_until_ready(timeout=60)
            for step in range(STEPS):
                await mq.enqueue({"step": step, "weights": bytearray(1_000_000)}, timeout=30)
            await mq.aclose()  # returns when the remote reader has received everything, or is gone


async def read(name: str, handle: Handle, rank: int) -> None:
    """Receive until the writer closes; a writer that is silent for 10 s is dead."""
    async with MessageQueue.create_from_handle(handle, rank) as mq:
        await mq.wait_until_ready(timeout=60)
        received = 0
        try:
            async for message in mq:
                assert message["step"] == received
                received += 1
        except PeerDied as error:
            print(f"{name}: {error}", flush=True)
        print(f"{name}: {received} steps", flush=True)


async def both() -> None:
    """Play both hosts, the second one in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "handle.json"
        serving = asyncio.create_task(serve("127.0.0.1", file))
        while not os.path.exists(file):  # noqa: ASYNC110, ASYNC240 - as scp would
            await asyncio.sleep(0.01)
        second = await asyncio.create_subprocess_exec(sys.executable, __file__, "read", os.fspath(file))
        await serving
        await second.wait()


def main() -> None:
    match sys.argv[1:]:
        case []:
            asyncio.run(both())
        case ["serve", address, file]:
            asyncio.run(serve(address, Path(file)))
        case ["read", file]:
            asyncio.run(read("remote", Handle.from_json(Path(file).read_text()), REMOTE))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
