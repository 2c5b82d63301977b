"""How the pump of an auto-pipeline ends."""

import asyncio
from types import TracebackType
from typing import Any, Self

import pytest

from headway.shared.autopipeline import AutoPipeline
from headway.shared.errors import QueueUnavailable
from helpers import PATIENCE_S


class Stubborn:
    """A Redis client that loses a cancellation, as redis-py's can in Python 3.11."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    def pipeline(self, transaction: bool) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass

    def execute_command(self, *command: Any) -> None:
        self.sent.set()

    async def execute(self, raise_on_error: bool) -> list[bytes]:
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            return [b"PONG"]


async def test_a_lost_cancellation_does_not_keep_it_open() -> None:
    # Given a pump whose client has lost the cancellation
    redis: Any = Stubborn()
    pipeline = AutoPipeline(redis)
    asking = asyncio.create_task(pipeline.command("PING"))
    async with asyncio.timeout(PATIENCE_S):
        await redis.sent.wait()
        # I expect it to end all the same, and to take nothing more
        await pipeline.aclose()
        assert await asking == b"PONG"
    with pytest.raises(QueueUnavailable, match="closed"):
        await pipeline.command("PING")
