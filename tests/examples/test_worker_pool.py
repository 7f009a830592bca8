"""``examples/pool.py`` under load, while its workers are killed at random."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support import until

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVE = "import asyncio, pool; asyncio.run(pool.main(3, 0))"
CLIENTS = 6
KILLS = 4
REQUESTS = 200
TIMEOUT_S = 40.0


@asynccontextmanager
async def server() -> AsyncIterator[tuple[psutil.Process, int]]:
    """Give the server, and where it listens, to the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, cwd=EXAMPLES, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
        assert line.startswith(b"serving on port ")
        seen = psutil.Process(process.pid)
        yield seen, int(line.split()[-1])
        workers = seen.children(recursive=True)
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()
    await until(lambda: not any(worker.is_running() for worker in workers), "the end of every worker", TIMEOUT_S)


async def ask(port: int, numbers: list[int], answers: dict[int, str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        writer.write(f"{number}\n".encode())
        answers[number] = (await asyncio.wait_for(reader.readline(), TIMEOUT_S)).decode().strip()
    writer.close()
    await writer.wait_closed()


def check(answers: dict[int, str], killed: set[int]) -> int:
    """Return how many requests have failed, each with another one of the workers that were killed."""
    failed = {number: text for number, text in answers.items() if text != str(sum(range(number)))}
    blamed = [re.fullmatch(r"worker \d \(pid (\d+)\) died", text) for text in failed.values()]
    pids = [int(match[1]) for match in blamed if match]
    assert len(pids) == len(failed), failed
    assert set(pids) <= killed
    assert len(set(pids)) == len(pids), "a worker has one request at a time"
    return len(failed)


@pytest.mark.one_loop
async def test_every_request_is_answered_or_fails_with_its_worker() -> None:
    chance, killed, answers = random.Random(4), set[int](), dict[int, str]()
    async with server() as (process, port):
        for number in range(KILLS):
            numbers = list(range(20_000 + REQUESTS * number, 20_000 + REQUESTS * (number + 1)))
            asking = [asyncio.ensure_future(ask(port, numbers[n::CLIENTS], answers)) for n in range(CLIENTS)]
            wanted = REQUESTS * number + chance.randrange(1, REQUESTS // 2)
            await until(lambda wanted=wanted: len(answers) >= wanted, "answers", TIMEOUT_S)
            victim = chance.choice([worker for worker in process.children() if worker.pid not in killed])
            killed.add(victim.pid)
            victim.send_signal(signal.SIGKILL)
            await asyncio.gather(*asking)
        assert len(answers) == KILLS * REQUESTS
        failed = check(answers, killed)
        # Those who were killed last may be noticed by the next requests.
        last: dict[int, str] = {}
        for number in itertools.count(1):
            await ask(port, [number], last)
            if last[number] == str(sum(range(number))):
                break
        assert failed + check(last, killed) <= len(killed)
