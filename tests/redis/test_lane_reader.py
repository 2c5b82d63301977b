"""Reading lanes: order, room, waiting and waking."""

import asyncio
import time

import pytest
from redis.asyncio import Redis

from headway.shared.keys import GROUP, Keys
from headway.shared.lane_reader import MAX_BLOCK_S, LaneReader
from headway.shared.queue import Queue
from helpers import ALONE, DONE, PATIENCE_S, deliver, make_job


async def _waiting(redis: Redis) -> None:
    """Returns when somebody waits in a blocking read."""
    async with asyncio.timeout(PATIENCE_S):
        while int((await redis.info("clients"))["blocked_clients"]) == 0:
            pass


async def test_returned_first_then_by_tier(queue: Queue, reader: LaneReader) -> None:
    # Given a job of each tier, submitted in the wrong order, and one that came back
    returned = await deliver(queue, reader, make_job())
    jobs = {tier: make_job(tier=tier) for tier in ("flex", "default", "priority")}
    for job in jobs.values():
        await queue.submit(job)
    await queue.requeue(returned, "test")

    # If I read with room for three, I expect the first three in order, and no more than three
    expected = [returned.job.id, jobs["priority"].id, jobs["default"].id]
    assert [ticket.job_id for ticket in await reader.read({"short": 3})] == expected


async def test_lanes_are_apart(queue: Queue, reader: LaneReader) -> None:
    # Given a job in lane mid
    job = make_job(lane="mid")
    await queue.submit(job)

    # If I read lane short, I expect nothing; if I wait for both, the job
    assert await reader.read({"short": 1}) == []
    (ticket,) = await reader.wait(["short", "mid"], PATIENCE_S)
    assert (ticket.job_id, ticket.lane) == (job.id, "mid")


async def test_lanes_of_earlier_bounds_are_found(queue: Queue, reader: LaneReader) -> None:
    # Given a worker that has looked, and then a job in a lane that it does not know, and one of another model
    assert await reader.lanes(["short"]) == ["short"]
    await queue.submit(make_job(lane="huge"))
    await queue.submit(make_job("other", lane="tiny"))

    # If I ask for the lanes, I expect the first one too, once it has looked again
    async with asyncio.timeout(PATIENCE_S):
        while await reader.lanes(["short"]) != ["short", "huge"]:  # noqa: ASYNC110 - nothing says that a second is over
            await asyncio.sleep(0.01)
    assert len(await reader.read({"huge": 1})) == 1


async def test_a_job_wakes_a_wait(queue: Queue, reader: LaneReader, redis: Redis) -> None:
    # Given a worker that waits
    waiting = asyncio.create_task(reader.wait(["short"], None))
    await _waiting(redis)

    # If a job comes, I expect it at once
    began = time.monotonic()
    job = make_job()
    await queue.submit(job)
    assert [ticket.job_id for ticket in await waiting] == [job.id]
    assert time.monotonic() - began < MAX_BLOCK_S / 2


async def test_wake_ends_a_wait(reader: LaneReader, redis: Redis) -> None:
    # Given a worker that waits, and one that does not wait yet
    waiting = asyncio.create_task(reader.wait(["short"], None))
    await _waiting(redis)

    # If somebody wakes it, I expect it to come back early, and empty
    began = time.monotonic()
    await reader.wake()
    assert await waiting == []
    assert time.monotonic() - began < MAX_BLOCK_S / 2


async def test_wake_without_a_wait_returns(reader: LaneReader) -> None:
    await asyncio.wait_for(reader.wake(), PATIENCE_S)


@pytest.mark.parametrize("timeout_s", [0.001, 0.03, 0.1])
async def test_the_timeout_is_exact(reader: LaneReader, timeout_s: float) -> None:
    # If I wait in vain five times
    took = []
    for _ in range(5):
        began = time.monotonic()
        assert await reader.wait(["short"], timeout_s) == []
        took.append(time.monotonic() - began)

    # I expect the median at the timeout; the server's own clock of blocked clients has steps of 100 ms
    assert sorted(took)[2] == pytest.approx(timeout_s, abs=0.015)


async def test_groups_come_back(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a server that lost a lane's group, as after a failover
    await redis.xgroup_destroy(keys.lane("0", "m", "short", "default"), GROUP)
    with pytest.raises(Exception, match="NOGROUP"):
        await reader.read({"short": 1})

    # If the worker looks at its lanes again, I expect them to work
    await reader.lanes(["short"])
    await queue.submit(make_job())
    assert len(await reader.read({"short": 1})) == 1


async def test_the_lag_of_a_lane_is_what_waits(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given three jobs, one of which was read, given back and read again, and finished
    first = await deliver(queue, reader, make_job())
    for _ in range(2):
        await queue.submit(make_job())
    await queue.requeue(first, "test")
    (ticket,) = await reader.read({"short": 1})
    heir = await queue.open(ticket, "w1", ALONE)
    assert heir is not None
    await queue.finish(heir, 0, DONE)

    # I expect the groups to say what waits, which is what autoscalers look at
    async def lag(stream: str) -> int | None:
        return (await redis.xinfo_groups(stream))[0]["lag"]

    assert await lag(keys.lane("0", "m", "short", "default")) == 2
    assert await lag(keys.lane("0", "m", "short", "returned")) == 0
    assert await lag(keys.lane("0", "m", "mid", "default")) == 0
