"""A server that is silent without closing its connections, as after a power loss or behind a forgetful firewall."""

import asyncio
from pathlib import Path

import pytest

from headway.shared import connect, lane_reader, notices
from headway.shared import queue as queue_module
from headway.shared.errors import QueueUnavailable
from headway.shared.queue import Queue
from helpers import DONE, PATIENCE_S, deliver, eventually, make_job, transcript
from redis_proxy import Proxy


async def test_reads_and_notices_notice(
    redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given short patience, and a process behind a proxy
    monkeypatch.setattr(lane_reader, "MAX_BLOCK_S", 0.2)
    monkeypatch.setattr(queue_module, "MAX_BLOCK_S", 0.2)
    monkeypatch.setattr(queue_module, "SOCKET_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connect, "SOCKET_TIMEOUT_S", 0.3)
    monkeypatch.setattr(notices, "_SILENCE_S", 0.2)
    async with (
        Proxy.before(redis_url, tmp_path) as (proxy, url),
        Queue.connect(url, prefix=prefix) as distant,
        Queue.connect(redis_url, prefix=prefix) as near,
        near.lane_reader("w1", "m") as reader,
        distant.lane_reader("w2", "m") as blind,
    ):
        await reader.lanes(["short"])
        await blind.lanes(["short"])
        delivery = await deliver(near, reader, make_job())
        following = asyncio.create_task(transcript(distant, delivery.job.id))
        told: asyncio.Queue[bytes | None] = asyncio.Queue()
        async with distant.cancels(told.put_nowait), asyncio.timeout(PATIENCE_S):
            await told.get()
            waiting = asyncio.create_task(blind.wait(["short"], None))
            await eventually(lambda: blind._blocked_client)

            # If the server's side falls silent on all connections that are there
            proxy.freeze()

            # I expect the read to give up, the subscriber to look again on a new connection, and a wake to return
            await blind.wake()
            with pytest.raises(QueueUnavailable):
                await waiting
            assert await told.get() is None
            await near.finish(delivery, 0, DONE)
            assert (await following)[-1].final
