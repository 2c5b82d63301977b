"""How full the lanes are: what scaling, dashboards and, later, waits are computed from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headway.shared.errors import QueueUnavailable
from headway.shared.job import LaneState
from headway.shared.keys import GROUP, Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import Queue
from helpers import ALONE, DONE, deliver, make_job, read_one
from valkey_server import Valkey

LANES = ("short", "mid", "long")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Valkey]:
    """One whose configuration the test may change."""
    valkey = Valkey(tmp_path)
    valkey.start()
    yield valkey
    valkey.stop()


async def _lane(queue: Queue, lane: str = "short", tier: str = "default") -> LaneState:
    (found,) = [s for s in await queue.survey("m", LANES) if (s.model, s.lane, s.tier) == ("m", lane, tier)]
    return found


def _counts(state: LaneState) -> tuple[int, int, int]:
    return state.waiting, state.running, state.waiting_tokens


async def test_the_lanes_of_a_new_system_are_empty_and_exist(queue: Queue, redis: Redis, keys: Keys) -> None:
    # Given a Redis with nothing in it, if I look at the lanes
    states = await queue.survey("m", LANES)

    # I expect each stream of each lane, empty; and that all are there with their group, for whoever else looks
    assert [(s.lane, s.tier) for s in states if s.lane == "mid"] == [
        ("mid", tier) for tier in ("returned", "priority", "default", "flex")
    ]
    assert len(states) == 12
    assert {(*_counts(s), s.oldest_wait_s) for s in states} == {(0, 0, 0, 0.0)}
    for stream in keys.lane_streams("0", "m", "long"):
        (group,) = await redis.xinfo_groups(stream)
        # and that it counts from its first entry on, so that what waits is a number at all times
        assert (group["name"].decode(), group["entries-read"], group["lag"]) == (GROUP, 0, 0)


async def test_the_count_of_waiting_jobs_is_what_an_autoscaler_sees(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given three jobs in one lane and tier, and one of another model
    for _ in range(3):
        await queue.submit(make_job(lane="mid", tier="flex", prompt_tokens=700))
    await queue.submit(make_job("other", lane="mid", tier="flex"))

    # If a worker reads one
    ticket = await read_one(reader, "mid")

    # I expect two that wait and one that is held, as XINFO says; it is queued until it is opened
    (group,) = await redis.xinfo_groups(keys.lane("0", "m", "mid", "flex"))
    assert (group["lag"], group["pending"]) == (2, 1)
    assert _counts(await _lane(queue, "mid", "flex")) == (2, 1, 2100)
    await queue.open(ticket, "w1", ALONE)
    assert _counts(await _lane(queue, "mid", "flex")) == (2, 1, 1400)
    others = [s for s in await queue.survey("m", LANES) if s.model == "other"]
    assert {s.tier: s.waiting for s in others} == {"returned": 0, "priority": 0, "default": 0, "flex": 1}


async def test_the_oldest_wait_is_that_of_the_next_entry(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a lane whose first entry, now with a worker, came long before its second
    stream = keys.lane("0", "m", "short", "default")
    now_ms = int(float((await redis.time())[0]) * 1000)
    fields: dict[Any, Any] = {"job": make_job().id, "prompt_tokens": 1, "reserve_tokens": 1, "choices": 1}
    await redis.xadd(stream, fields, id=f"{now_ms - 600_000}-0")
    await redis.xadd(stream, fields, id=f"{now_ms - 60_000}-0")
    assert 590 < (await _lane(queue)).oldest_wait_s < 620

    # If the first is read, I expect the second's wait
    await read_one(reader)
    assert 55 < (await _lane(queue)).oldest_wait_s < 80


async def test_the_backlog_is_exact_on_every_way_of_a_job(queue: Queue, reader: LaneReader) -> None:
    # Given a job that was opened, given back, read and returned unopened, and opened again
    job = make_job(prompt_tokens=30)
    delivery = await deliver(queue, reader, job)
    assert _counts(await _lane(queue)) == (0, 1, 0)
    await queue.requeue(delivery, "test")
    assert _counts(await _lane(queue, tier="returned")) == (1, 0, 30)
    ticket = await read_one(reader)
    await queue.requeue(ticket, "test")
    assert _counts(await _lane(queue, tier="returned")) == (1, 0, 30)
    again = await queue.open(await read_one(reader), "w1", ALONE)
    assert again is not None
    assert _counts(await _lane(queue, tier="returned")) == (0, 1, 0)

    # If it finishes, I expect nothing left anywhere
    await queue.finish(again, 0, DONE)
    assert {_counts(state) for state in await queue.survey("m", LANES)} == {(0, 0, 0)}


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_job_is_no_backlog(queue: Queue, reader: LaneReader, times: int) -> None:
    # Given a queued job
    job = make_job(prompt_tokens=30)
    await queue.submit(job)
    await queue.submit(job)
    assert (await _lane(queue)).waiting_tokens == 30

    # If it is cancelled, however often, I expect its tokens gone at once, and its entry once a worker has read it
    for _ in range(times):
        await queue.cancel(job.id)
    assert _counts(await _lane(queue)) == (1, 0, 0)
    assert await queue.open(await read_one(reader), "w1", ALONE) is None
    assert _counts(await _lane(queue)) == (0, 0, 0)


async def test_a_group_that_was_lost_is_made_again(queue: Queue, redis: Redis, keys: Keys) -> None:
    # Given a lane whose group somebody has destroyed
    await queue.submit(make_job())
    await redis.xgroup_destroy(keys.lane("0", "m", "short", "default"), GROUP)

    # If I look, I expect the job as one that waits
    assert (await _lane(queue)).waiting == 1


async def test_an_account_that_went_wrong_is_shown_as_nothing_and_mended(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a lane with a job, of whose tokens the account says less than none
    stream = keys.lane("0", "m", "short", "default")
    delivery = await deliver(queue, reader, make_job())
    await queue.submit(make_job())
    await redis.hset(keys.backlog("0"), stream, -50)

    # I expect no tokens, and the account left alone, since it is not known what is right
    assert _counts(await _lane(queue)) == (1, 1, 0)
    assert await redis.hget(keys.backlog("0"), stream) == b"-50"

    # If the lane is empty once, I expect a new account, which is right from the next job on
    await queue.finish(delivery, 0, DONE)
    last = await queue.open(await read_one(reader), "w1", ALONE)
    assert last is not None
    await queue.finish(last, 0, DONE)
    assert _counts(await _lane(queue)) == (0, 0, 0)
    assert await redis.hget(keys.backlog("0"), stream) is None
    await queue.submit(make_job(prompt_tokens=30))
    assert _counts(await _lane(queue)) == (1, 0, 30)


async def test_a_model_may_be_named_as_keys_are(queue: Queue, keys: Keys) -> None:
    # Given a job of a model whose name looks like the end of a lane's key
    await queue.submit(make_job("a:lane:b", lane="mid"))

    # I expect its lane under its whole name
    waiting = [(s.model, s.lane, s.tier) for s in await queue.survey("m", LANES) if s.waiting]
    assert waiting == [("a:lane:b", "mid", "default")]
    assert keys.parse_lane(keys.lane("0", "a:lane:b", "mid", "flex")) == ("a:lane:b", "mid", "flex")


@pytest.mark.parametrize(
    ("refuse", "admit"),
    [
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    ],
)
async def test_a_server_that_takes_no_writes(own_server: Valkey, refuse: str, admit: str) -> None:
    # Given a replica, or a server that is full
    async with Queue.connect(own_server.url) as queue, Redis.from_url(own_server.url) as redis:
        await redis.execute_command(refuse)

        # If lanes are missing that it does not let me make, I expect the same as from a server that is away
        with pytest.raises(QueueUnavailable):
            await queue.survey("m", LANES)

        # If they have been made in a better moment, I expect their figures
        await redis.execute_command(admit)
        await queue.survey("m", LANES)
        await queue.submit(make_job())
        await redis.execute_command(refuse)
        assert _counts(await _lane(queue)) == (1, 0, 10)
