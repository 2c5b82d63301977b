"""How the engine tests call an engine."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from headway.worker.engines.base import Chunk, Engine, Final, Request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def run(engine: Engine, endpoint: str, body: dict[str, Any], job_id: str = "job-0-test"):
    """All of one run: the chunks, and the final."""
    *chunks, final = [item async for item in engine.run(Request(job_id, endpoint, body))]
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert isinstance(final, Final)
    return chunks, final


async def plain(engine: Engine, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """The parsed answer to a request that does not stream."""
    chunks, final = await run(engine, endpoint, body)
    assert (chunks, final.status_code) == ([], 200), final
    return json.loads(final.body)


async def error(engine: Engine, endpoint: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and error object of a request that is refused."""
    chunks, final = await run(engine, endpoint, body)
    assert chunks == []
    return final.status_code, json.loads(final.body)["error"]


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Returns once vLLM's own count says so."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(0.005)
