"""What several test folders say the same way."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from headway.shared.job import Delivery, Job, Outcome, Reply, Status, Ticket, mint_job_id
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import Batch, Queue

#: Seconds within which anything that a test waits for must have happened.
PATIENCE_S = 20

ALONE = Batch("test/1", 1, "immediate", 0)
DONE = Outcome(Status.COMPLETED, 200, b'{"answer": 42}')


def make_job(model: str = "m", *, max_tokens: int = 5, **fields: Any) -> Job:
    """A chat job as the API would make it."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": max_tokens}
    wanted = {
        "endpoint": "/v1/chat/completions",
        "body": json.dumps(body).encode(),
        "lane": "short",
        "prompt_tokens": 10,
        "reserve_tokens": 10 + max_tokens,
    } | fields
    return Job(id=mint_job_id(), model=model, **wanted)


def chunks(*texts: str) -> list[Reply]:
    return [Reply(0, "chunk", text.encode()) for text in texts]


async def read_one(reader: LaneReader, lane: str = "short") -> Ticket:
    (ticket,) = await reader.read({lane: 1})
    return ticket


async def deliver(queue: Queue, reader: LaneReader, job: Job, worker: str = "w1") -> Delivery:
    """Submits, reads and opens a job."""
    await queue.submit(job)
    delivery = await queue.open(await read_one(reader, job.lane), worker, ALONE)
    assert delivery is not None
    return delivery


async def transcript(queue: Queue, job_id: str, after: int = 0) -> list[Reply]:
    """All replies of a job up to its end."""
    async with asyncio.timeout(PATIENCE_S):
        return [reply async for reply in queue.follow(job_id, after)]


async def eventually(condition: Callable[[], Any]) -> Any:
    """The first true value of a condition, looked at once a turn of the loop and at least every 10 ms."""
    async with asyncio.timeout(PATIENCE_S):
        while not (value := condition()):  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)
        return value
