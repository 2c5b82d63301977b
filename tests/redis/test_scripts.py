"""Each script: what it writes, what it refuses, and that it may be repeated."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from headway.shared.errors import JobNotFound
from headway.shared.job import Reply, Status, mint_job_id
from headway.shared.keys import GROUP, Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import LogGap, Outcome, Queue, Retention
from helpers import ALONE, DONE, chunks, deliver, make_job, read_one, transcript


async def _entries(redis: Redis, stream: str) -> int:
    return await redis.xlen(stream)


async def _pending(redis: Redis, stream: str) -> int:
    return (await redis.xpending(stream, GROUP))["pending"]


async def test_submit_writes_record_body_and_entry(queue: Queue, reader: LaneReader) -> None:
    # Given a job whose body is no JSON that Python would write
    job = make_job(body=b'{"model":"m" ,  "messages":[],"temperature":1.0e0}', tier="flex")

    # If I submit it
    assert await queue.submit(job) == "queued"

    # I expect its record, an entry to decide admission by, and the very bytes of the body
    record = await queue.record(job.id)
    assert record is not None
    assert (record.status, record.lane, record.tier, record.attempt) == (Status.QUEUED, "short", "flex", 0)
    ticket = await read_one(reader)
    assert (ticket.job_id, ticket.prompt_tokens, ticket.reserve_tokens) == (job.id, 10, 15)
    delivery = await queue.open(ticket, "w1", ALONE)
    assert delivery is not None
    assert delivery.job == job


async def test_submit_twice_makes_one_entry(queue: Queue, redis: Redis, keys: Keys) -> None:
    # Given a job that was submitted, whose answer was lost
    job = make_job()
    await queue.submit(job)

    # If I submit it again
    assert await queue.submit(job) == "already"

    # I expect one entry
    assert await _entries(redis, keys.lane("0", "m", "short", "default")) == 1


async def test_open_counts_attempts_and_is_repeatable(queue: Queue, reader: LaneReader) -> None:
    # Given a job that this worker has read
    await queue.submit(make_job())
    ticket = await read_one(reader)

    # If it opens the job twice, the first answer being lost
    first = await queue.open(ticket, "w1", ALONE)
    again = await queue.open(ticket, "w1", ALONE)

    # I expect one attempt, and the same delivery
    assert first is not None
    assert first.attempt == 1
    assert again == first


async def test_open_refuses_a_job_that_another_worker_has(queue: Queue, reader: LaneReader, redis: Redis) -> None:
    # Given a job that worker w1 runs
    delivery = await deliver(queue, reader, make_job())

    # If another opens the same entry, I expect a refusal, and that the entry stays w1's
    assert await queue.open(delivery.ticket, "w2", ALONE) is None
    assert await _pending(redis, delivery.ticket.stream) == 1
    assert (await queue.append(delivery, 0, chunks("a")))[0] == "ok"


async def test_open_drops_an_entry_that_the_record_does_not_name(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a second entry of a queued job, which only a fault can have made
    job = make_job()
    await queue.submit(job)
    genuine = await read_one(reader)
    stream = keys.lane("0", "m", "short", "default")
    await redis.xadd(stream, {"job": job.id, "prompt_tokens": 1, "reserve_tokens": 1, "choices": 1})
    stray = await read_one(reader)

    # If I open the stray one, I expect that it is dropped, and that the genuine one still opens
    assert await queue.open(stray, "w1", ALONE) is None
    assert await _entries(redis, stream) == 1
    assert await queue.open(genuine, "w1", ALONE) is not None


async def test_open_drops_an_entry_without_a_record(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given an entry whose job's record has expired
    job = make_job()
    await queue.submit(job)
    await redis.delete(keys.job(job.id))

    # If I open it, I expect that nothing of it is left
    assert await queue.open(await read_one(reader), "w1", ALONE) is None
    assert await _entries(redis, keys.lane("0", "m", "short", "default")) == 0
    assert await redis.exists(keys.job(job.id)) == 0


async def test_append_continues_the_log_and_is_repeatable(queue: Queue, reader: LaneReader) -> None:
    # Given a running job
    delivery = await deliver(queue, reader, make_job())

    # If I append twice, and repeat the second append because its answer was lost
    assert await queue.append(delivery, 0, chunks("a", "b")) == ("ok", False)
    assert await queue.append(delivery, 2, chunks("c")) == ("ok", False)
    assert await queue.append(delivery, 2, chunks("c")) == ("already", False)
    await queue.finish(delivery, 3, DONE)

    # I expect contiguous offsets and one end
    replies = await transcript(queue, delivery.job.id)
    assert replies == [
        Reply(1, "chunk", b"a"),
        Reply(2, "chunk", b"b"),
        Reply(3, "chunk", b"c"),
        Reply(4, "end", b"completed"),
    ]


async def test_append_with_a_wrong_offset_is_refused(queue: Queue, reader: LaneReader) -> None:
    # Given a log with two replies
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a", "b"))

    # If somebody appends behind an offset that the log is not at, I expect a refusal and an unchanged log
    for wrong in (0, 3):
        with pytest.raises(LogGap):
            await queue.append(delivery, wrong, chunks("x"))
    await queue.finish(delivery, 2, DONE)
    assert [reply.data for reply in await transcript(queue, delivery.job.id)] == [b"a", b"b", b"completed"]


async def test_a_stale_attempt_can_write_nothing(queue: Queue, reader: LaneReader) -> None:
    # Given a job whose first attempt was given back, and whose second attempt runs
    stale = await deliver(queue, reader, make_job())
    await queue.requeue(stale, "test")
    heir = await queue.open(await read_one(reader), "w1", ALONE)
    assert heir is not None
    assert heir.attempt == 2

    # If the first attempt writes, I expect each script to say `lost`
    assert await queue.append(stale, 0, chunks("zombie")) == ("lost", False)
    assert await queue.finish(stale, 0, DONE) == "lost"
    assert await queue.requeue(stale, "test") == "lost"

    # And the second attempt to be unharmed
    await queue.append(heir, 0, chunks("a"))
    assert await queue.finish(heir, 1, DONE) == "ok"
    assert [reply.data for reply in await transcript(queue, stale.job.id)] == [b"a", b"completed"]


async def test_a_stale_attempt_with_its_heirs_entry_cannot_give_the_job_back(queue: Queue, reader: LaneReader) -> None:
    # Given an attempt that knows its heir's entry, so that only the attempt tells them apart
    stale = await deliver(queue, reader, make_job())
    await queue.requeue(stale, "test")
    heir = await queue.open(await read_one(reader), "w1", ALONE)
    assert heir is not None
    forged = replace(stale, ticket=heir.ticket)

    # If it gives the job back, I expect a refusal
    assert await queue.requeue(forged, "test") == "lost"
    assert (await queue.append(heir, 0, chunks("a")))[0] == "ok"


async def test_nothing_is_written_while_the_job_waits(queue: Queue, reader: LaneReader, redis: Redis) -> None:
    # Given a job that its holder has given back, and nobody has opened since
    delivery = await deliver(queue, reader, make_job())
    assert await queue.requeue(delivery, "test") == "ok"

    # If the former holder writes, I expect `lost`, and a job that still waits
    assert await queue.append(delivery, 0, chunks("zombie")) == ("lost", False)
    assert await queue.finish(delivery, 0, DONE) == "lost"
    record = await queue.record(delivery.job.id)
    assert record is not None
    assert (record.status, record.offset) == (Status.QUEUED, 0)


async def test_finish_ends_everything_at_once(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a running job
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a"))

    # If its holder finishes it with the last replies
    answer = await queue.finish(delivery, 1, DONE, replies=chunks("b"), output_tokens=2, first_token_age_s=1.5)

    # I expect the last replies, one end, the result, the status, and no entry any more
    assert answer == "ok"
    assert [reply.data for reply in await transcript(queue, delivery.job.id)] == [b"a", b"b", b"completed"]
    assert await queue.result(delivery.job.id) == DONE
    record = await queue.record(delivery.job.id)
    assert record is not None
    assert (record.status, record.status_code, record.output_tokens) == (Status.COMPLETED, 200, 2)
    assert record.first_token_at_ms is not None
    assert record.finished_at_ms is not None
    assert record.finished_at_ms - record.first_token_at_ms == 1500
    assert await _entries(redis, delivery.ticket.stream) == 0
    assert await _pending(redis, delivery.ticket.stream) == 0


async def test_finish_is_repeatable_and_terminal_is_final(queue: Queue, reader: LaneReader) -> None:
    # Given a finished job
    delivery = await deliver(queue, reader, make_job())
    assert await queue.finish(delivery, 0, DONE) == "ok"

    # If the same attempt finishes it again, gives it back or appends, and somebody cancels it
    other = Outcome(Status.FAILED, 500, b"{}")
    assert await queue.finish(delivery, 1, other) == "already"
    assert await queue.requeue(delivery, "test") == "lost"
    assert await queue.append(delivery, 1, chunks("late")) == ("lost", False)
    assert await queue.cancel(delivery.job.id) is Status.COMPLETED

    # I expect that nothing has changed
    assert await queue.result(delivery.job.id) == DONE
    assert [reply.data for reply in await transcript(queue, delivery.job.id)] == [b"completed"]


async def test_finish_at_a_wrong_offset_is_refused(queue: Queue, reader: LaneReader) -> None:
    # Given a running job with one reply
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a"))

    # If its holder finishes it as if there were none, I expect a refusal and a job that still runs
    with pytest.raises(LogGap):
        await queue.finish(delivery, 0, DONE)
    assert await queue.finish(delivery, 1, DONE) == "ok"


async def test_a_job_without_a_log_keeps_its_result_alone(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a plain synchronous job
    delivery = await deliver(queue, reader, make_job(log=False))

    # If it finishes, I expect an end for its follower, the result, and no log
    following = asyncio.create_task(transcript(queue, delivery.job.id))
    await queue.finish(delivery, 0, DONE, replies=chunks("not kept"))
    assert await following == [Reply(1, "end", b"completed")]
    assert await queue.result(delivery.job.id) == DONE
    assert await redis.exists(keys.log(delivery.job.id)) == 0


async def test_requeue_moves_an_open_job_to_the_returned_stream(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a job that runs, and one that waits in the same lane
    delivery = await deliver(queue, reader, make_job())
    waiting = make_job(tier="priority")
    await queue.submit(waiting)

    # If its holder gives it back, twice because an answer was lost
    assert await queue.requeue(delivery, "drain") == "ok"
    assert await queue.requeue(delivery, "drain") == "lost"

    # I expect one entry, which is read before all others
    assert await _entries(redis, keys.lane("0", "m", "short", "returned")) == 1
    assert await _entries(redis, delivery.ticket.stream) == 0
    assert [ticket.job_id for ticket in await reader.read({"short": 5})] == [delivery.job.id, waiting.id]


async def test_requeue_of_an_entry_that_was_not_opened(queue: Queue, reader: LaneReader) -> None:
    # Given an entry that was read but not opened
    job = make_job()
    await queue.submit(job)
    ticket = await read_one(reader)

    # If its reader gives it back, twice because an answer was lost
    assert await queue.requeue(ticket, "no room") == "ok"
    assert await queue.requeue(ticket, "no room") == "lost"

    # I expect the same job again, with no attempt spent
    again = await read_one(reader)
    assert (again.job_id, again.prompt_tokens, again.reserve_tokens, again.choices) == (job.id, 10, 15, 1)
    record = await queue.record(job.id)
    assert record is not None
    assert record.attempt == 0


@pytest.mark.parametrize("end", ["cancelled", "gone"])
async def test_requeue_drops_an_unopened_entry_for_which_nothing_is_left_to_do(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys, end: str
) -> None:
    # Given an entry that was read, and whose job was cancelled, or has vanished, meanwhile
    job = make_job()
    await queue.submit(job)
    ticket = await read_one(reader)
    await (queue.cancel(job.id) if end == "cancelled" else redis.delete(keys.job(job.id)))

    # If its reader gives it back, I expect nothing to be left of it
    assert await queue.requeue(ticket, "no room") == "lost"
    for stream in keys.lane_streams("0", "m", "short"):
        assert await _entries(redis, stream) == 0
    assert await _pending(redis, ticket.stream) == 0


async def test_failures_are_counted_apart_from_attempts(queue: Queue, reader: LaneReader) -> None:
    # Given a job that was given back because its worker stopped, and then because the engine failed
    delivery = await deliver(queue, reader, make_job())
    for failed in (False, True):
        await queue.requeue(delivery, "test", failed=failed)
        heir = await queue.open(await read_one(reader), "w1", ALONE)
        assert heir is not None
        delivery = heir

    # I expect three attempts, and one failure
    assert (delivery.attempt, delivery.failures) == (3, 1)


async def test_requeue_as_unopened_is_refused_once_the_job_runs(queue: Queue, reader: LaneReader) -> None:
    # Given a job that runs
    delivery = await deliver(queue, reader, make_job())

    # If somebody gives its entry back as one that was never opened, I expect a refusal
    assert await queue.requeue(delivery.ticket, "lost read") == "lost"
    assert await queue.finish(delivery, 0, DONE) == "ok"


async def test_cancel_of_a_queued_job_is_terminal_at_once(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a queued job
    job = make_job()
    await queue.submit(job)

    # If somebody cancels it
    assert await queue.cancel(job.id) is Status.CANCELLED

    # I expect its end and result now, and the entry to be a tombstone that open drops
    assert await transcript(queue, job.id) == [Reply(1, "end", b"cancelled")]
    result = await queue.result(job.id)
    assert result is not None
    assert (result.status, result.status_code) == (Status.CANCELLED, 499)
    stream = keys.lane("0", "m", "short", "default")
    assert await _entries(redis, stream) == 1
    assert await queue.open(await read_one(reader), "w1", ALONE) is None
    assert await _entries(redis, stream) == 0
    assert await queue.record(job.id) is not None
    assert (await queue.record(job.id)).status is Status.CANCELLED  # type: ignore[union-attr]


async def test_cancel_of_a_running_job_tells_its_holder(queue: Queue, reader: LaneReader) -> None:
    # Given a running job, and a worker that listens
    delivery = await deliver(queue, reader, make_job())
    told: asyncio.Queue[bytes | None] = asyncio.Queue()
    async with queue.cancels(told.put_nowait), asyncio.timeout(20):
        assert await told.get() is None  # The subscription is confirmed.

        # If somebody cancels the job
        assert await queue.cancel(delivery.job.id) is Status.IN_PROGRESS

        # I expect the holder to be told, by the channel and by its next append; and that it cannot give the job back
        assert await told.get() == delivery.job.id.encode()
        assert await queue.append(delivery, 0, chunks("a")) == ("ok", True)
        assert await queue.append(delivery, 0, chunks("a")) == ("already", True)
        assert await queue.requeue(delivery, "drain") == "cancelled"
        assert await queue.finish(delivery, 1, Outcome(Status.CANCELLED, 499, b"{}")) == "ok"


async def test_an_unknown_job(queue: Queue, redis: Redis, keys: Keys) -> None:
    # Given an id that no job has
    job_id = mint_job_id()

    # I expect nothing to be known of it, and nothing to be written for it
    assert await queue.record(job_id) is None
    assert await queue.result(job_id) is None
    assert await queue.cancel(job_id) is None
    with pytest.raises(JobNotFound):
        await transcript(queue, job_id)
    assert await redis.exists(keys.job(job_id), keys.log(job_id), keys.result(job_id)) == 0


async def test_each_key_has_its_own_expiry(redis_url: str, prefix: str, redis: Redis, keys: Keys) -> None:
    # Given retention of 100, 50 and 10 seconds, and a finished and a cancelled job
    retention = Retention(record_s=100, result_s=50, log_s=10)
    async with Queue.connect(redis_url, prefix=prefix, retention=retention) as queue:
        cancelled = make_job()
        await queue.submit(cancelled)
        await queue.cancel(cancelled.id)
        async with queue.lane_reader("w1", "m") as reader:
            await reader.lanes(["short"])
            await queue.open(await read_one(reader), "w1", ALONE)
            delivery = await deliver(queue, reader, make_job())
            await queue.finish(delivery, 0, DONE)

    # I expect their keys to expire in time
    for job_id in (delivery.job.id, cancelled.id):
        ttl = [await redis.ttl(key(job_id)) for key in (keys.job, keys.result, keys.body, keys.log)]
        assert ttl == pytest.approx([100, 50, 50, 10], abs=2)


async def test_events_are_written_only_for_a_mirror(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a job from before anybody asked for events
    await deliver(queue, reader, make_job())
    assert await redis.exists(keys.events("0")) == 0

    # If a mirror asks for them, and a job goes through its whole life
    await redis.xgroup_create(keys.events("0"), "mirror", mkstream=True)
    delivery = await deliver(queue, reader, make_job())
    await queue.requeue(delivery, "drain")
    heir = await queue.open(await read_one(reader), "w1", ALONE)
    assert heir is not None
    await queue.finish(heir, 0, DONE)

    # I expect each step once
    events = [fields for _, fields in await redis.xrange(keys.events("0"))]
    assert {fields[b"job"].decode() for fields in events} == {delivery.job.id}
    assert [fields[b"event"] for fields in events] == [
        b"queued", b"in_progress", b"returned", b"in_progress", b"completed",
    ]  # fmt: skip


async def test_scripts_come_back_after_the_server_forgot_them(queue: Queue, redis: Redis) -> None:
    # Given a server that has lost its scripts, as after a failover
    await queue.submit(make_job())
    await redis.script_flush()

    # If I submit jobs, I expect them to be accepted
    answers = await asyncio.gather(*(queue.submit(make_job()) for _ in range(10)))
    assert answers == ["queued"] * 10
