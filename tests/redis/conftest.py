"""A queue on the real server, and a worker's reader."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from headway.shared.keys import Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import Queue

LANES = ("short", "mid", "long")


@pytest.fixture
async def queue(redis_url: str, prefix: str) -> AsyncIterator[Queue]:
    async with Queue.connect(redis_url, prefix=prefix) as queue:
        yield queue


@pytest.fixture
async def reader(queue: Queue) -> AsyncIterator[LaneReader]:
    async with queue.lane_reader("w1", "m") as reader:
        await reader.lanes(LANES)
        yield reader


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Straight to the server, to look at keys."""
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def keys(prefix: str) -> Keys:
    return Keys(prefix)
