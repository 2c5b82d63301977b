"""Reading reply channels: late, together, from any offset, across broken connections."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headway.shared import following
from headway.shared.errors import JobNotFound, LogExpired, QueueClosed
from headway.shared.job import Reply, mint_job_id
from headway.shared.keys import Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.queue import BEHIND_ALL, Queue
from helpers import DONE, PATIENCE_S, chunks, deliver, eventually, make_job, transcript
from redis_proxy import Proxy
from valkey_server import Valkey


async def test_several_readers_see_one_transcript(queue: Queue, reader: LaneReader) -> None:
    # Given a running job with an early reader
    delivery = await deliver(queue, reader, make_job())
    early = asyncio.create_task(transcript(queue, delivery.job.id))
    await queue.append(delivery, 0, chunks("a", "b"))

    # If another comes in the middle, from the start, a third from an offset, and a fourth after the end
    middle = asyncio.create_task(transcript(queue, delivery.job.id))
    offset = asyncio.create_task(transcript(queue, delivery.job.id, after=1))
    await queue.append(delivery, 2, chunks("c"))
    await queue.finish(delivery, 3, DONE)
    late = await transcript(queue, delivery.job.id)

    # I expect the same from all
    assert [reply.data for reply in late] == [b"a", b"b", b"c", b"completed"]
    assert await early == await middle == late
    assert await offset == late[1:]


async def test_a_long_log_comes_in_pages(queue: Queue, reader: LaneReader) -> None:
    # Given a finished job with more replies than one page
    delivery = await deliver(queue, reader, make_job())
    for page in range(5):
        await queue.append(delivery, page * 500, chunks(*(str(n) for n in range(500))))
    await queue.finish(delivery, 2500, DONE)

    # If somebody reads it, I expect every offset once
    assert [reply.offset for reply in await transcript(queue, delivery.job.id)] == list(range(1, 2502))


async def test_each_reply_is_read_at_once(queue: Queue, reader: LaneReader) -> None:
    # Given a reader that follows a running job
    delivery = await deliver(queue, reader, make_job())
    seen: asyncio.Queue[Reply] = asyncio.Queue()

    async def follow() -> None:
        async for reply in queue.follow(delivery.job.id):
            seen.put_nowait(reply)

    following = asyncio.create_task(follow())

    # If each reply is awaited before the next is written, I expect none to wait for the safety read
    async with asyncio.timeout(4):
        for offset in range(20):
            await queue.append(delivery, offset, chunks(str(offset)))
            assert (await seen.get()).offset == offset + 1
        await queue.finish(delivery, 20, DONE)
        await following


async def test_who_lacks_replies_of_an_expired_log_is_told(
    queue: Queue, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a finished job whose log is gone, and its end is 3
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a", "b"))
    await queue.finish(delivery, 2, DONE)
    await redis.delete(keys.log(delivery.job.id))

    # If somebody follows it who lacks a reply, I expect no end that looks like all of it
    for after in range(3):
        with pytest.raises(LogExpired):
            await transcript(queue, delivery.job.id, after)
    # and nothing at all for who has the end
    assert await transcript(queue, delivery.job.id, 3) == await transcript(queue, delivery.job.id, BEHIND_ALL) == []


async def test_a_log_expires_under_a_reader(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a reader who has the first of three replies
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a"))
    replies = queue.follow(delivery.job.id)
    assert (await anext(replies)).data == b"a"
    # If the job ends, and its log goes before the reader comes again
    await queue.append(delivery, 1, chunks("b"))
    await queue.finish(delivery, 2, DONE)
    await redis.delete(keys.log(delivery.job.id))
    # I expect the reader to be told
    with pytest.raises(LogExpired):
        await anext(replies)


async def test_a_log_that_has_lost_its_beginning(queue: Queue, reader: LaneReader, redis: Redis, keys: Keys) -> None:
    # Given a running job whose first reply is gone
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a", "b"))
    await redis.xdel(keys.log(delivery.job.id), "1-0")
    # If somebody reads it from the start, I expect no text with a hole
    with pytest.raises(LogExpired):
        await transcript(queue, delivery.job.id)


async def test_a_job_without_a_log_has_one_end(queue: Queue, reader: LaneReader) -> None:
    # Given a finished job without a log
    delivery = await deliver(queue, reader, make_job(log=False))
    await queue.finish(delivery, 0, DONE)
    # If somebody follows it, I expect its end, and nothing behind it
    assert await transcript(queue, delivery.job.id) == [Reply(1, "end", b"completed")]
    assert await transcript(queue, delivery.job.id, 1) == []


async def test_a_job_that_there_is_not_has_no_replies(queue: Queue) -> None:
    with pytest.raises(JobNotFound):
        await transcript(queue, mint_job_id())


async def test_a_closed_queue_is_no_outage(redis_url: str, prefix: str) -> None:
    # Given a follower with all the patience of the world
    async with Queue.connect(redis_url, prefix=prefix) as queue:
        job = make_job()
        await queue.submit(job)
    # If its queue is closed, I expect it to end
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(QueueClosed):
            await anext(following.follow(queue, job.id, patience_s=1e9))


async def test_lost_notices_do_no_harm(
    redis_url: str, prefix: str, queue: Queue, reader: LaneReader, tmp_path: Path, redis: Redis
) -> None:
    # Given a reader, and a running job
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a"))
    async with Proxy.before(redis_url, tmp_path) as (_, url), Queue.connect(url, prefix=prefix) as distant:
        following = asyncio.create_task(transcript(distant, delivery.job.id))
        channel = Keys(prefix).notice(delivery.job.id)

        async def subscribers() -> int:
            return (await redis.pubsub_numsub(channel))[0][1]

        async with asyncio.timeout(PATIENCE_S):
            while await subscribers() == 0:
                pass

        # If its notice connection is cut while replies are written
        await redis.client_kill_filter(_type="pubsub")
        await queue.append(delivery, 1, chunks("b"))
        await queue.finish(delivery, 2, DONE)

        # I expect the whole transcript
        assert [reply.data for reply in await following] == [b"a", b"b", b"completed"]


async def test_a_crowd_of_readers_shares_two_connections(redis_url: str, prefix: str, redis: Redis) -> None:
    # Given 200 jobs and a process that follows all of them
    before = {client["id"] for client in await redis.client_list()}
    async with Queue.connect(redis_url, prefix=prefix) as queue:
        jobs = [make_job() for _ in range(200)]
        await asyncio.gather(*(queue.submit(job) for job in jobs))
        following = [asyncio.create_task(transcript(queue, job.id)) for job in jobs]
        numsub = [Keys(prefix).notice(job.id) for job in jobs]

        async def all_subscribed() -> bool:
            return all(count for _, count in await redis.pubsub_numsub(*numsub))

        async with asyncio.timeout(PATIENCE_S):
            while not await all_subscribed():
                pass

        # I expect two connections
        assert len({client["id"] for client in await redis.client_list()} - before) == 2
        await asyncio.gather(*(queue.cancel(job.id) for job in jobs))
        assert all(replies[-1].final for replies in await asyncio.gather(*following))


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_jobs_and_logs_outlive_the_server(tmp_path: Path, end: str) -> None:
    # Given a durable server with a job in its lane, and one that runs, whose reader follows
    valkey = Valkey(tmp_path, appendonly=True)
    valkey.start()
    async with Queue.connect(valkey.url) as queue, queue.lane_reader("w1", "m") as reader:
        await reader.lanes(["short"])
        delivery = await deliver(queue, reader, make_job())
        waiting = make_job()
        await queue.submit(waiting)
        await queue.append(delivery, 0, chunks("a"))
        seen: list[Reply] = []

        async def follow() -> None:
            async for reply in queue.follow(delivery.job.id):
                seen.append(reply)  # noqa: PERF401 - the list is looked at while it grows

        following = asyncio.create_task(follow())
        await eventually(lambda: seen)

        # If it ends and is started again while nobody writes
        getattr(valkey, end)()
        valkey.start()

        # I expect the running job to go on, its reader to see all of it, and the waiting one to be there
        await queue.append(delivery, 1, chunks("b"))
        await queue.finish(delivery, 2, DONE)
        await asyncio.wait_for(following, PATIENCE_S)
        assert [reply.data for reply in seen] == [b"a", b"b", b"completed"]
    async with Queue.connect(valkey.url) as queue, queue.lane_reader("w1", "m") as reader:
        assert [ticket.job_id for ticket in await reader.read({"short": 5})] == [waiting.id]
    valkey.stop()


async def test_who_keeps_up_is_told_and_need_not_read(queue: Queue, reader: LaneReader, redis: Redis) -> None:
    # Given a reader that has read all that there is of a running job
    delivery = await deliver(queue, reader, make_job())
    await queue.append(delivery, 0, chunks("a"))
    follower = queue.follow(delivery.job.id)
    assert (await anext(follower)).data == b"a"

    async def reads() -> int:
        return int((await redis.info("commandstats"))["cmdstat_xrange"]["calls"])

    # If short replies come, two at once, I expect each without another look into the log
    before = await reads()
    await queue.append(delivery, 1, chunks("b", "naïve 🚂\n"))
    async with asyncio.timeout(PATIENCE_S):
        assert [(await anext(follower)).data.decode() for _ in "bc"] == ["b", "naïve 🚂\n"]
        assert await reads() == before

        # If a long one comes, I expect it from the log
        await queue.append(delivery, 3, chunks("x" * 10_000))
        assert await anext(follower) == Reply(4, "chunk", b"x" * 10_000)
        assert await reads() == before + 1
    await follower.aclose()
