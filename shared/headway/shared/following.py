"""Following a job through outages of Redis."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headway.shared.errors import QueueClosed, QueueUnavailable
from headway.shared.job import Reply
from headway.shared.queue import Queue

#: Seconds between two looks whether Redis is back.
_LOOK_S = 0.5


async def follow(queue: Queue, job_id: str, after: int = 0, *, patience_s: float) -> AsyncGenerator[Reply, None]:
    """`Queue.follow`, which goes on from its last offset after each outage of up to `patience_s` seconds.

    Raises:
        JobNotFound, LogExpired: as `Queue.follow`.
        QueueUnavailable: Redis was away for longer.
        QueueClosed: the queue was closed meanwhile.
    """
    while True:
        try:
            async with aclosing(queue.follow(job_id, after)) as replies:
                async for reply in replies:
                    after = reply.offset
                    yield reply
            return
        except QueueClosed:
            raise
        except QueueUnavailable:
            await until_back(queue, patience_s)


async def until_back(queue: Queue, patience_s: float) -> None:
    """Returns when Redis answers again.

    Raises:
        QueueUnavailable: it does not within `patience_s` seconds.
        QueueClosed: the queue was closed meanwhile.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience_s
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            return await queue.ping()
        except QueueUnavailable as error:
            if isinstance(error, QueueClosed) or clock() > deadline:
                raise
