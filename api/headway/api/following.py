"""Waiting for replies on behalf of a client."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from headway.shared import following
from headway.shared.job import Reply
from headway.shared.queue import BEHIND_ALL, Queue

#: Seconds that a client is held while Redis is away. An error would make it ask, and the model generate, twice.
PATIENCE_S = 30.0

_T = TypeVar("_T")


def follow(queue: Queue, job_id: str, after: int = 0) -> AsyncGenerator[Reply, None]:
    """The replies behind an offset, through outages of up to `PATIENCE_S`; same errors as `following.follow`."""
    return following.follow(queue, job_id, after, patience_s=PATIENCE_S)


async def until_end(queue: Queue, job_id: str) -> None:
    """Returns when the job has ended; same errors as `follow`."""
    async for _ in follow(queue, job_id, BEHIND_ALL):
        pass


async def with_heartbeats(replies: AsyncGenerator[Reply, None], every_s: float) -> AsyncGenerator[Reply | None, None]:
    """The replies up to the final one, and None after each `every_s` seconds of silence."""
    coming = asyncio.create_task(next_of(replies))
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
            coming = asyncio.create_task(next_of(replies))
            yield reply
    finally:
        await _end(coming)
        await replies.aclose()


async def next_of(items: AsyncGenerator[_T, None]) -> _T:
    """The next item, as a coroutine, which `anext` is not."""
    return await anext(items)


async def rejoin(first: _T, rest: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
    """All items again, of which the first was looked at."""
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; it is cancelled when the client hangs up.

    Raises:
        ClientDisconnect: the client has hung up.
    """
    return await unless(_hang_up(request), work)


async def unless(interruption: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; it is cancelled, and the error raised, when `interruption` raises one first."""
    working, watching = asyncio.create_task(work), asyncio.create_task(interruption)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return working.result()
    finally:
        await _end(working)
        await _end(watching)


async def _hang_up(request: Request) -> NoReturn:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _end(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        # Nobody is left to hear of an error; asyncio would log one that nobody has looked at.
        task.exception()
