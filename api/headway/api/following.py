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


async def peek(
    items: AsyncGenerator[_T, None], timeout_s: float | None = None
) -> tuple[_T | None, AsyncGenerator[_T, None]]:
    """The first item, or None when it does not come in time; and all items, the first included."""
    first = asyncio.create_task(_next_of(items))
    try:
        await asyncio.wait({first}, timeout=timeout_s)
        return first.result() if first.done() else None, _rejoin(first, items)
    except BaseException:
        await end(first)
        await items.aclose()
        raise


async def _next_of(items: AsyncGenerator[_T, None]) -> _T:
    # A coroutine, which `anext` is not.
    return await anext(items)


async def _rejoin(first: "asyncio.Task[_T]", rest: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
    async with aclosing(rest):
        try:
            yield await first
        finally:
            await end(first)
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
        await end(working)
        await end(watching)


async def _hang_up(request: Request) -> NoReturn:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancels a task and returns when it has ended, however."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        # Nobody is left to hear of an error; asyncio would log one that nobody has looked at.
        task.exception()
