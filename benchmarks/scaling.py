"""What more workers gain: one, then three, then one again, under a constant load. The last line is JSON.

The workers run the simulated engine, so that a machine without GPUs shows what the queue does, not what an engine does.
Two workers are told to stop in the middle of the load: every accepted job must still complete.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from headway.producer.child import Child
from headway.producer.embedded import socket_path, valkey_command
from headway.shared.errors import QueueUnavailable
from headway.shared.job import Job, mint_job_id
from headway.shared.queue import Queue

#: Jobs in the system at any time: more than three workers hold.
_LOAD = 60

#: An engine that is slow enough for two cores to serve three: 4 short jobs at once, half a second each. A worker that
#: stops gives all of them back at once.
_ENGINE = {"SIMULATED_SLOTS": "8", "SIMULATED_STEP_MS": "20", "ENGINE": "simulated", "MODEL": "m"}
_TOKENS = 27

#: Seconds before a phase is measured: workers start, and jobs of the phase before end.
_SETTLE_S = 1.0


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=6.0, show_default=True, help="Length of each phase.")
def main(seconds: float) -> None:
    """Measure what three workers do beside one."""
    print(json.dumps(asyncio.run(measure(seconds))))


async def measure(seconds: float) -> dict[str, Any]:
    """Runs the three phases.

    Returns:
        Jobs a second of each phase, the ratio of three workers to one, and how many of the accepted jobs completed.
    """
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        async with _server(Path(folder)) as url, Queue.connect(url) as queue, AsyncExitStack() as workers:
            load = _Load(queue)
            await workers.enter_async_context(_worker(Path(folder), url, "w1"))
            async with load.running():
                one = await load.rate(seconds)
                async with _worker(Path(folder), url, "w2"), _worker(Path(folder), url, "w3"):
                    three = await load.rate(seconds)
                again = await load.rate(seconds)
    rates = {"one": one, "three": three, "one_again": again}
    counts = {"accepted": load.accepted, "statuses": dict(load.statuses), "attempts": dict(load.attempts)}
    lost = load.accepted - load.statuses["completed"]
    return {"benchmark": "scaling", "jobs_per_s": rates, **counts, "lost": lost, "ratio": round(three / one, 2)}


class _Load:
    """Keeps a constant number of jobs in the system, and counts how they end."""

    def __init__(self, queue: Queue) -> None:
        self.accepted = 0
        self.statuses: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()
        self._queue = queue
        self._over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        callers = [asyncio.create_task(self._caller()) for _ in range(_LOAD)]
        yield
        self._over = True
        await asyncio.gather(*callers)

    async def rate(self, seconds: float) -> float:
        """Completed jobs a second, once the phase has settled."""
        await asyncio.sleep(_SETTLE_S)
        begun, before = time.monotonic(), self.statuses["completed"]
        await asyncio.sleep(seconds)
        return round((self.statuses["completed"] - before) / (time.monotonic() - begun), 2)

    async def _caller(self) -> None:
        while not self._over:
            job = _job()
            await self._queue.submit(job)
            self.accepted += 1
            async for _ in self._queue.follow(job.id):
                pass
            record = await self._queue.record(job.id)
            self.statuses[record.status if record else "gone"] += 1
            self.attempts[record.attempt if record else 0] += 1


def _job() -> Job:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": _TOKENS}
    raw = json.dumps(body).encode()
    return Job(mint_job_id(), "m", "/v1/chat/completions", raw, "short", 10, 10 + _TOKENS, log=False)


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[str]:
    with socket_path(folder) as path:
        child = Child("valkey", valkey_command(folder, path), folder / "valkey.log")
        await child.start()
        try:
            url = f"unix://{path}"
            async with Queue.connect(url) as queue:
                await _until(lambda: _answers(queue))
            yield url
        finally:
            await child.stop(10)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - what is awaited is another process
            await asyncio.sleep(0.05)


async def _answers(queue: Queue) -> bool:
    try:
        await queue.ping()
    except QueueUnavailable:
        return False
    return True


@asynccontextmanager
async def _worker(folder: Path, url: str, name: str) -> AsyncIterator[None]:
    port = _free_port()
    settings = {**_ENGINE, "REDIS_URL": url, "DRAIN_S": "0", "HEALTH_PORT": str(port)}
    environment = {**os.environ, **{f"HEADWAY_{key}": value for key, value in settings.items()}}
    command = [sys.executable, "-m", "headway.worker"]
    child = Child(name, command, folder / f"{name}.log", environment=environment)
    await child.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            await _until(lambda: _healthy(http, port))
        yield
    finally:
        await child.stop(20)


async def _healthy(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/health")).is_success
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
