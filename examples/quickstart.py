import asyncio
import multiprocessing

from aioshm import Handle, MessageQueue


def reader(handle: Handle) -> None:
    async def read() -> None:
        async with MessageQueue.create_from_handle(handle, rank=0) as mq:
            async for message in mq:  # ends when the writer closes
                print("received", message)

    asyncio.run(read())


async def main() -> None:
    async with MessageQueue(n_reader=1) as mq:
        multiprocessing.get_context("spawn").Process(target=reader, args=(mq.export_handle(),)).start()
        for number in range(3):
            await mq.enqueue({"number": number})


if __name__ == "__main__":
    asyncio.run(main())
