"""An API in the test's own loop, of whose queue the test is the worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from redis.asyncio import Redis

from headway.api.app import create_app
from headway.shared.job import Delivery
from headway.shared.keys import Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import Queue
from headway.shared.settings import Settings
from headway.shared.tokens import COMPLETIONS, estimate
from helpers import ALONE, PATIENCE_S
from programs import MODEL, serving


@dataclass(frozen=True)
class Bench:
    """An API, and the worker's side of its queue.

    Attributes:
        url: where the API listens.
    """

    url: str
    http: httpx.AsyncClient
    queue: Queue
    reader: LaneReader

    def ask(self, path: str = COMPLETIONS, **fields: Any) -> "asyncio.Task[httpx.Response]":
        """Sends a completion request; its answer comes when the test has played the worker."""
        return asyncio.create_task(self.http.post(path, json={"prompt": "Once", **fields}))

    async def take(self) -> Delivery:
        """Opens the next job, as a worker would."""
        tickets = []
        async with asyncio.timeout(PATIENCE_S):
            while not tickets:
                tickets = await self.reader.wait(["short"], 1)
        delivery = await self.queue.open(tickets[0], "w1", ALONE)
        assert delivery is not None
        return delivery


@asynccontextmanager
async def working(**fields: Any) -> AsyncIterator[Bench]:
    """A bench with these settings."""
    settings = Settings(engine="simulated", served_model=MODEL, **fields)
    async with AsyncExitStack() as stack:
        queue = await stack.enter_async_context(Queue.connect(settings.redis_url, prefix=settings.prefix))
        reader = await stack.enter_async_context(queue.lane_reader("w1", MODEL))
        await reader.lanes(["short"])
        url = await stack.enter_async_context(serving(create_app(settings, counter=estimate)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S))
        yield Bench(url, http, queue, reader)


@asynccontextmanager
async def followed(redis_url: str, prefix: str, job_id: str) -> AsyncIterator[None]:
    """A job that has one follower at the start of this block, and none at its end."""
    channel = Keys(prefix).notice(job_id)
    async with Redis.from_url(redis_url) as redis:

        async def followers(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while dict(await redis.pubsub_numsub(channel))[channel.encode()] != count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await followers(1)
        yield
        await followers(0)
