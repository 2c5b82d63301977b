"""How the pump of an auto-pipeline ends."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, NoScriptError

from headway.shared import autopipeline
from headway.shared.autopipeline import AutoPipeline
from headway.shared.connect import connect
from headway.shared.errors import QueueUnavailable
from helpers import PATIENCE_S


async def test_a_lost_cancellation_does_not_keep_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a pump whose connection has lost the cancellation, as redis-py's can in Python 3.11
    sent = asyncio.Event()

    async def stubborn(connection: Any, commands: Any) -> list[bytes]:
        sent.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            return [b"PONG"]

    monkeypatch.setattr(autopipeline, "ask", stubborn)
    pipeline = AutoPipeline(connect("redis://nowhere"))
    asking = asyncio.create_task(pipeline.command("PING"))
    async with asyncio.timeout(PATIENCE_S):
        await sent.wait()
        # I expect it to end all the same, and to take nothing more
        await pipeline.aclose()
        assert await asking == b"PONG"
    with pytest.raises(QueueUnavailable, match="closed"):
        await pipeline.command("PING")


async def test_a_refused_script_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server that knows no script and takes none
    async def forbidding(connection: Any, commands: Any) -> list[Any]:
        load = commands[0][0] == "SCRIPT"
        return [NoPermissionError("no SCRIPT for you") if load else NoScriptError("none") for _ in commands]

    monkeypatch.setattr(autopipeline, "ask", forbidding)
    pipeline = AutoPipeline(connect("redis://nowhere"))

    # If a script is run, I expect the refusal, and not an outage that would pass
    with pytest.raises(NoPermissionError):
        await pipeline.script("append", [], [])
    await pipeline.aclose()
