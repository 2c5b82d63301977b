"""Waiting for replies on behalf of an HTTP client."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from headway.shared.errors import JobNotFound, QueueUnavailable
from headway.shared.job import Reply
from headway.shared.queue import Queue

#: Seconds that a client is held while Redis is away. An error would make it ask, and the model generate, twice.
PATIENCE_S = 30.0

#: Seconds between two looks whether Redis is back.
_LOOK_S = 0.5

_T = TypeVar("_T")


async def follow(queue: Queue, job_id: str, after: int = 0) -> AsyncGenerator[Reply, None]:
    """`Queue.follow`, through outages of up to `PATIENCE_S`.

    Raises:
        JobNotFound: there is no such job, or no longer.
        QueueUnavailable: Redis was away for longer.
    """
    while True:
        try:
            async with aclosing(queue.follow(job_id, after)) as replies:
                async for reply in replies:
                    after = reply.offset
                    yield reply
                    if reply.final:
                        return
            raise JobNotFound(f"The job {job_id} is gone.")
        except QueueUnavailable:
            await _until_back(queue)


async def _until_back(queue: Queue) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + PATIENCE_S
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            return await queue.ping()
        except QueueUnavailable:
            if clock() > deadline:
                raise


async def until_end(queue: Queue, job_id: str, after: int = 0) -> None:
    """Returns when the job has ended."""
    async for _ in follow(queue, job_id, after):
        pass


async def with_heartbeats(replies: AsyncGenerator[Reply, None], every_s: float) -> AsyncGenerator[Reply | None, None]:
    """The replies up to the final one, and None after each `every_s` seconds of silence."""
    coming = asyncio.create_task(_next(replies))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=every_s)
            if not done:
                yield None
                continue
            reply = coming.result()
            if reply.final:
                yield reply
                return
            coming = asyncio.create_task(_next(replies))
            yield reply
    finally:
        await _end(coming)
        await replies.aclose()


async def _next(replies: AsyncGenerator[Reply, None]) -> Reply:
    return await anext(replies)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; it is cancelled when the client hangs up.

    Raises:
        ClientDisconnect: the client has hung up.
    """
    working, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _end(working)
        await _end(gone)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        # Nobody is left to hear of an error; asyncio would log one that nobody has looked at.
        task.exception()
