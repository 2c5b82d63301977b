"""The answer to each script is lost once: no entry twice, no job twice."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headway.shared.errors import QueueUnavailable
from headway.shared.job import Reply, Status
from headway.shared.keys import Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import Queue
from headway.shared.scripts import script
from helpers import ALONE, DONE, chunks, make_job, read_one, transcript
from redis_proxy import Proxy


@pytest.fixture
async def proxied(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[tuple[Proxy, Queue]]:
    async with Proxy.before(redis_url, tmp_path) as (proxy, url), Queue.connect(url, prefix=prefix) as queue:
        yield proxy, queue


def _lose(proxy: Proxy, name: str) -> None:
    proxy.swallow(script(name).sha.encode())


async def test_each_script_once(proxied: tuple[Proxy, Queue], reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a server that knows the scripts, behind a proxy that swallows the answer to each script once
    proxy, queue = proxied
    for name in ("submit", "open", "append", "finish", "requeue", "cancel"):
        await redis.script_load(script(name).text)

    # If a job goes through its whole life, given back and continued
    job = make_job()
    _lose(proxy, "submit")
    await queue.submit(job)
    ticket = await read_one(reader)
    _lose(proxy, "requeue")
    await queue.requeue(ticket, "no room")
    _lose(proxy, "open")
    delivery = await queue.open(await read_one(reader), "w1", ALONE)
    assert delivery is not None
    _lose(proxy, "append")
    await queue.append(delivery, 0, chunks("a", "b"))
    _lose(proxy, "cancel")
    assert await queue.cancel(job.id) is Status.IN_PROGRESS
    _lose(proxy, "finish")
    await queue.finish(delivery, 2, DONE, replies=chunks("c"))

    # I expect that every answer was lost, and that everything is there exactly once
    assert proxy.swallowed == 6
    assert [reply.data for reply in await transcript(queue, job.id)] == [b"a", b"b", b"c", b"completed"]
    record = await queue.record(job.id)
    assert record is not None
    assert (record.status, record.attempt, record.offset) == (Status.COMPLETED, 1, 4)
    for stream in keys.lane_streams("0", "m", "short"):
        assert await redis.xlen(stream) == 0


async def test_cancel_of_a_queued_job(proxied: tuple[Proxy, Queue], redis: Redis) -> None:
    # Given a queued job
    proxy, queue = proxied
    await redis.script_load(script("cancel").text)
    job = make_job()
    await queue.submit(job)

    # If the answer to its cancel is lost, I expect one end
    _lose(proxy, "cancel")
    assert await queue.cancel(job.id) is Status.CANCELLED
    assert await transcript(queue, job.id) == [Reply(1, "end", b"cancelled")]
    assert proxy.swallowed == 1


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_lost_read_loses_no_job(proxied: tuple[Proxy, Queue], blocking: bool) -> None:
    # Given a worker whose read reached the server, and whose answer did not come back
    proxy, queue = proxied
    job = make_job()
    await queue.submit(job)
    async with queue.lane_reader("w1", "m") as reader:
        await reader.lanes(["short"])
        proxy.swallow(b"short:default")
        with pytest.raises(QueueUnavailable):
            await (reader.wait(["short"], 1) if blocking else reader.read({"short": 1}))

        # If it reads again, I expect nothing; if it recovers, the entry
        assert await reader.read({"short": 1}) == []
        assert [ticket.job_id for ticket in await reader.recover(["short"])] == [job.id]
