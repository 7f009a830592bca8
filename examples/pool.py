"""A server whose workers may be killed (``kill -9``). Run it, and send numbers to it with ``nc localhost 8765``."""

import asyncio
import itertools
import os
import sys

from aioshm import AioshmError, MessageQueue

Request = tuple[int, asyncio.Future[int]]


async def work(name: str) -> None:
    async with MessageQueue.attach(f"{name}-in", 0) as jobs, MessageQueue(1, name=name) as answers:
        await answers.wait_until_ready(timeout=10)
        async for number in jobs:
            await answers.enqueue(sum(range(number)))


async def keep_worker(rank: int, requests: asyncio.Queue[Request]) -> None:
    for name in (f"pool-{os.getpid()}-{rank}-{number}" for number in itertools.count()):
        async with MessageQueue(1, name=f"{name}-in") as jobs, MessageQueue.attach(name, 0, timeout=None) as answers:
            worker = await asyncio.create_subprocess_exec(sys.executable, __file__, name)
            serving = asyncio.create_task(serve(requests, jobs, answers, f"worker {rank} (pid {worker.pid}) died"))
            try:
                await worker.wait()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


async def serve(requests: asyncio.Queue[Request], jobs: MessageQueue, answers: MessageQueue, death: str) -> None:
    await asyncio.gather(jobs.wait_until_ready(), answers.wait_until_ready())
    while True:
        number, answer = await requests.get()  # one at a time: no more are lost when this worker dies
        try:
            await jobs.enqueue(number)
            answer.set_result(await answers.dequeue())
        except (AioshmError, asyncio.CancelledError):
            answer.set_exception(RuntimeError(death))
            raise


async def main(workers: int = 3, port: int = 8765) -> None:
    requests = asyncio.Queue[Request]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            requests.put_nowait((int(line), answer := asyncio.get_running_loop().create_future()))
            await asyncio.wait([answer])
            writer.write(f"{answer.exception() or answer.result()}\n".encode())

    async with await asyncio.start_server(talk, "127.0.0.1", port) as server:
        print("serving on port", server.sockets[0].getsockname()[1], flush=True)
        await asyncio.gather(*(keep_worker(rank, requests) for rank in range(workers)))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]) if sys.argv[1:] else main())
