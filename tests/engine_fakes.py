"""An engine that a test plays by hand: the one thing that we do not own."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator

from headway.worker.engines.base import Capacity, Chunk, Final, Request


def chunk(text: str, finish_reason: str | None = None) -> Chunk:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    data = {"object": "chat.completion.chunk", "choices": [choice]}
    return Chunk(json.dumps(data).encode(), data)


class ScriptedEngine:
    """Each run gives what the test puts into `say[job id]`; `None` there makes it wait for `go` first."""

    def __init__(self, slots: int = 10, kv_tokens: int = 100_000) -> None:
        self._capacity = Capacity(slots, kv_tokens, 32_768)
        self.alive = True
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.answers: deque[list[Chunk | Final]] = deque()
        self.holds: dict[str, asyncio.Event] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def hold(self, job_id: str) -> asyncio.Event:
        """The run of this job waits, after its first chunk, until the event is set."""
        return self.holds.setdefault(job_id, asyncio.Event())

    async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        self.started.append(request.id)
        answer = self.answers.popleft() if self.answers else [chunk("Hello"), chunk("", "stop"), Final(200, None)]
        try:
            for number, item in enumerate(answer):
                if number == 1 and request.id in self.holds:
                    await self.holds[request.id].wait()
                yield item
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.id)
            raise
