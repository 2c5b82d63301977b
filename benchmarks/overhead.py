"""What Headway costs: the same vLLM engine behind vLLM's own server, and behind Headway. The last line is JSON.

One process holds the engine and serves it twice: *direct* is vLLM's own ASGI application behind uvicorn, as
`vllm serve` has it; *headway* is a worker on the same engine, with an embedded Valkey and the API as processes of their
own, as `headway up` runs them. The load comes from a further process (`load.py`), the same for both.
"""

import asyncio
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import click
import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table

from headway.producer.cli import one_line
from headway.producer.demo import INTERRUPTED, demo_settings
from headway.producer.stack import Stack
from headway.producer.up import until_signal
from headway.shared.job import Delivery, Ticket
from headway.shared.queue import Batch, Queue
from headway.worker.engines.base import Chunk, Final, Request
from headway.worker.engines.sse import DONE, EventReader
from headway.worker.engines.vllm import VllmEngine
from headway.worker.worker import Worker

Side = Literal["direct", "headway"]
SIDES: tuple[Side, Side] = ("direct", "headway")

How = Literal["stream", "plain"]

CONCURRENCY = 32

#: On top of the embedded profile, for both sides: with 128 slots, half of which are the short lane's, admission holds
#: none of 32 jobs back, and a prefix cache would make the second side that is asked the faster one.
ENGINE_ARGS = ("--max-num-seqs", "128", "--no-enable-prefix-caching")

#: Requests to each side in one round on the idle system.
IDLE_REQUESTS = 30

#: What happens to a request between its sending and its first text, in this order. The direct side has `DIRECT_STAGES`.
STAGES = {
    "accept": "the API parses, counts tokens, submits",
    "read": "the worker reads it from its lane",
    "open": "the worker takes it and loads the body",
    "generate": "vLLM, up to its first text",
    "deliver": "append, notice, the API reads and sends",
}
DIRECT_STAGES = ("accept", "generate", "deliver")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has measured.

    Attributes:
        rates: output tokens a second of each side in a closed loop of `CONCURRENCY` callers, by how they ask.
        first_token_s: seconds from the sending of each request to its first text, on the idle system.
        stages_s: the same seconds of each request, by stage.
    """

    rates: dict[How, dict[Side, float]]
    first_token_s: dict[Side, list[float]]
    stages_s: dict[Side, list[dict[str, float]]]

    def ratio(self, how: How) -> float:
        return self.rates[how]["headway"] / self.rates[how]["direct"]

    @property
    def later_s(self) -> list[float]:
        """How much later Headway's first text came at each turn, in which both sides were asked one after the other."""
        turns = zip(self.first_token_s["headway"], self.first_token_s["direct"], strict=True)
        return [headway - direct for headway, direct in turns]

    @property
    def added_ms(self) -> float:
        """What Headway adds to the median request outside vLLM.

        The time inside is the same application's on the same engine, and scatters by more than what is added.
        """
        return _outside_vllm_ms(self.stages_s["headway"]) - _outside_vllm_ms(self.stages_s["direct"])


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests to a side at once.")
@click.option("--plain", is_flag=True, help="Measure the throughput of plain requests too, not of streams alone.")
@click.option("--quick", is_flag=True, help="Two short rounds, to see that it works.")
def main(rounds: int, requests: int, plain: bool, quick: bool) -> None:
    """Measure what Headway costs beside vLLM's own server, on the same engine."""
    if quick:
        rounds, requests = 2, CONCURRENCY
    hows: tuple[How, ...] = ("stream", "plain") if plain else ("stream",)
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, _logging_to(Path(folder, "engine.log")) as out:
        console = Console(file=out, highlight=False)
        try:
            result = uvloop.run(_measure(console, Path(folder), rounds, requests, hows))
        except Exception as error:
            raise one_line(error) or error from error
        print(json.dumps(result), file=out)


@contextmanager
def _logging_to(log: Path) -> Iterator[Any]:
    """Sends what this process and vLLM's print to a file, and gives the standard output that was.

    After success that stays so: vLLM still complains when Python ends.
    """
    kept = [os.dup(1), os.dup(2)]
    with os.fdopen(os.dup(1), "w", buffering=1) as out, log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield out
        except BaseException:
            sys.stdout.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            raise


async def _measure(console: Console, folder: Path, rounds: int, requests: int, hows: tuple[How, ...]) -> dict[str, Any]:
    say = partial(console.print, style="dim", soft_wrap=True)
    stack = Stack(demo_settings("vllm", folder), worker=False, say=say)
    async with until_signal(stack), stack, _both_sides(console, stack) as bench:
        done = []
        for number in range(rounds):
            done.append(await bench.round(number, requests, hows))
            console.print(f"round {number + 1} of {rounds}: {_told(done[-1])}", style="dim", soft_wrap=True)
        console.print(_rates(done), _first_tokens(done), sep="\n")
        return {**summary(done), "requests": requests, "model": bench.model, **_machine()}
    sys.exit(INTERRUPTED)


@asynccontextmanager
async def _both_sides(console: Console, stack: Stack) -> AsyncIterator["_Bench"]:
    """Starts the engine, the worker and the direct server, in this process."""
    settings = stack.settings
    argv = ["--model", settings.model, "--served-model-name", settings.model_name, *shlex.split(settings.engine_args)]
    console.print("Starting vLLM; that needs about half a minute", style="dim")
    async with _WatchedEngine.start([*argv, *ENGINE_ARGS]) as engine, _WatchedQueue.of(settings) as queue:
        assert isinstance(engine, _WatchedEngine)
        assert isinstance(queue, _WatchedQueue)
        worker = Worker(queue, engine, name="overhead", model=settings.model_name, lanes=settings.lanes)
        watched = _WatchedApp(engine.app)
        async with _serving(watched) as direct, _working(worker):
            yield _Bench({"direct": direct, "headway": stack.api_url}, settings.model_name, engine, queue, watched)


class _WatchedEngine(VllmEngine):
    """Notes, in Unix seconds, when each job was handed to vLLM and when its first text came."""

    called_at: dict[str, float]
    token_at: dict[str, float]

    def __init__(self, client: Any, app: Any) -> None:
        super().__init__(client, app)
        self.app = app
        self.called_at, self.token_at = {}, {}

    async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        self.called_at[request.id] = time.time()
        async with aclosing(super().run(request)) as items:
            async for item in items:
                if request.id not in self.token_at and isinstance(item, Chunk) and has_text(item.data):
                    self.token_at[request.id] = time.time()
                yield item


class _WatchedQueue(Queue):
    """Notes, in Unix seconds, when each job was read from its lane."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read_at: dict[str, float] = {}

    async def open(self, ticket: Ticket, worker: str, batch: Batch) -> Delivery | None:
        self.read_at[ticket.job_id] = time.time()
        return await super().open(ticket, worker, batch)


class _WatchedApp:
    """Notes, in Unix seconds, when the direct side had read each request and when its first text came."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.instants: list[list[float]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        instants: list[float] = []
        self.instants.append(instants)

        async def watched_receive() -> Any:
            message = await receive()
            if not instants and message["type"] == "http.request" and not message["more_body"]:
                instants.append(time.time())
            return message

        async def watched_send(message: Any) -> None:
            if len(instants) == 1 and any(has_text(chunk) for chunk in chunks(message.get("body", b""))):
                instants.append(time.time())
            await send(message)

        await self._app(scope, watched_receive, watched_send)


@dataclass(frozen=True)
class _Bench:
    urls: Mapping[Side, str]
    model: str
    engine: _WatchedEngine
    queue: _WatchedQueue
    app: _WatchedApp

    async def round(self, number: int, requests: int, hows: Sequence[How]) -> Round:
        """The throughput of both sides, and then the idle system; who goes first changes."""
        rates: dict[How, dict[Side, float]] = {}
        for step, how in enumerate(hows, number):
            rates[how] = {side: await self._rate(side, number, requests, how) for side in order(step)}
        self.app.instants.clear()
        asked = await self._first_tokens(number)
        seconds: dict[Side, list[float]] = {
            side: [one["token_at"] - one["sent_at"] for one in asked[side]] for side in SIDES
        }
        # The direct side was asked one by one, so its instants are in the order of its requests.
        direct = zip(asked["direct"], self.app.instants, strict=True)
        stages: dict[Side, list[dict[str, float]]] = {
            "direct": [_between(DIRECT_STAGES, one, instants) for one, instants in direct],
            "headway": [await self._stages(one) for one in asked["headway"]],
        }
        return Round(rates, seconds, stages)

    async def _first_tokens(self, number: int) -> dict[Side, list[dict[str, Any]]]:
        sides = order(number)
        urls = [self.urls[side] for side in sides]
        answers = await self._load("first-token", *urls, "--requests", str(IDLE_REQUESTS), seed=f"idle-{number}")
        return dict(zip(sides, answers, strict=True))

    async def _rate(self, side: Side, number: int, requests: int, how: How) -> float:
        options = ("--requests", str(requests), "--concurrency", str(CONCURRENCY), f"--{how}")
        done = await self._load("throughput", self.urls[side], *options, seed=f"{side}-{number}")
        return float(done["output_tokens"] / done["seconds"])

    async def _stages(self, request: Mapping[str, Any]) -> dict[str, float]:
        job = request["job"]
        record = await self.queue.record(job)
        assert record is not None
        # Redis keeps whole milliseconds: on average half a one is cut off.
        queued_at = (record.queued_at_ms + 0.5) / 1000
        instants = [queued_at, self.queue.read_at[job], self.engine.called_at[job], self.engine.token_at[job]]
        return _between(STAGES, request, instants)

    async def _load(self, *arguments: str, seed: str) -> Any:
        """Runs the load generator and gives what it prints."""
        command = [sys.executable, str(Path(__file__).with_name("load.py"))]
        command += [*arguments, "--model", self.model, "--seed", seed]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        try:
            output, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise click.ClickException(f"the load generator failed:\n{complaint.decode()}")
        return json.loads(output)


def _between(stages: Iterable[str], request: Mapping[str, Any], instants: Sequence[float]) -> dict[str, float]:
    """Seconds of each stage, whose ends are the instants between the sending of a request and its first text."""
    pairs = pairwise([request["sent_at"], *instants, request["token_at"]])
    return {name: end - begin for name, (begin, end) in zip(stages, pairs, strict=True)}


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: they are the benchmark's."""
        yield


@asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[str]:
    """Serves an application on a free port, in this process; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def _working(worker: Worker) -> AsyncIterator[None]:
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.stop(0)
        await running


def order(step: int) -> tuple[Side, Side]:
    """Who goes first at a step, so that neither side always has the warmer machine."""
    return ("headway", "direct") if step % 2 else ("direct", "headway")


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of the JSON line: medians over the rounds, or over all turns, each with the range of the rounds."""
    line: dict[str, Any] = {"benchmark": "overhead", "rounds": len(rounds)}
    for how in rounds[0].rates:
        end = "" if how == "stream" else f"_{how}"
        line |= _spread(f"throughput_ratio{end}", [one.ratio(how) for one in rounds], 3)
        line[f"tokens_per_s{end}"] = {side: _median(one.rates[how][side] for one in rounds) for side in SIDES}
    line |= _spread("added_ttft_ms_p50", [one.added_ms for one in rounds], 1)
    line |= _spread("later_by_turn_ms_p50", [1000 * statistics.median(one.later_s) for one in rounds], 1)
    line["later_by_turn_ms_p50"] = _median(1000 * later_s for one in rounds for later_s in one.later_s)
    first_ms = {side: [1000 * s for one in rounds for s in one.first_token_s[side]] for side in SIDES}
    stages_s = {side: [stages for one in rounds for stages in one.stages_s[side]] for side in SIDES}
    return {
        **line,
        "ttft_ms_p50": {side: _median(first_ms[side]) for side in SIDES},
        "outside_vllm_ms_p50": {side: round(_outside_vllm_ms(stages_s[side]), 1) for side in SIDES},
        "stages_ms_p50": {
            side: {name: _median(1000 * stages[name] for stages in stages_s[side]) for name in stages_s[side][0]}
            for side in SIDES
        },
    }


def _outside_vllm_ms(requests: Iterable[Mapping[str, float]]) -> float:
    """The median over requests, given by stage in seconds."""
    return 1000 * statistics.median(sum(s for name, s in stages.items() if name != "generate") for stages in requests)


def _spread(name: str, values: Sequence[float], digits: int) -> dict[str, Any]:
    low, high = round(min(values), digits), round(max(values), digits)
    return {name: round(statistics.median(values), digits), f"{name}_range": [low, high]}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 1)


def chunks(body: bytes) -> Iterator[dict[str, Any]]:
    """The chunks in a part of an event stream, which begins and ends between two events."""
    return (json.loads(data) for data in EventReader().feed(body) if data != DONE)


def has_text(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk of a chat carries text: the first one often has the role alone."""
    return any(choice["delta"].get("content") for choice in chunk["choices"])


def _told(one: Round) -> str:
    rates = [f"{how}: {rate['direct']:.1f}, {rate['headway']:.1f} tokens/s" for how, rate in one.rates.items()]
    return f"{'; '.join(rates)}; first text: {one.added_ms:+.1f} ms"


def _rates(rounds: Sequence[Round]) -> Table:
    table = _right("tokens/s", "direct", "headway", "ratio", "range of the ratio")
    for how in rounds[0].rates:
        direct, headway = (f"{statistics.median(one.rates[how][side] for one in rounds):.1f}" for side in SIDES)
        ratios = [one.ratio(how) for one in rounds]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        table.add_row(how, direct, headway, f"{statistics.median(ratios):.3f}", spread)
    return table


def _first_tokens(rounds: Sequence[Round]) -> Table:
    figures = summary(rounds)
    table = _right("ms to first text, idle", *SIDES, "")
    totals = [f"{figures['ttft_ms_p50'][side]:.1f}" for side in SIDES]
    table.add_row("median", *totals, f"by turn: {_told_spread(figures, 'later_by_turn_ms_p50')}")
    for name, text in STAGES.items():
        stages = [figures["stages_ms_p50"][side].get(name) for side in SIDES]
        table.add_row(f"  {name}", *("" if ms is None else f"{ms:.1f}" for ms in stages), text)
    outside = [f"{figures['outside_vllm_ms_p50'][side]:.1f}" for side in SIDES]
    table.add_row("  all but generate", *outside, f"added: {_told_spread(figures, 'added_ttft_ms_p50')}")
    return table


def _told_spread(figures: Mapping[str, Any], name: str) -> str:
    low, high = figures[f"{name}_range"]
    return f"{figures[name]:.1f} (rounds: {low:.1f} to {high:.1f})"


def _right(*headers: str) -> Table:
    table = Table(*headers, box=None)
    for column in table.columns[1:4]:
        column.justify = "right"
    return table


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"machine": {"cpu": cpu, "cores": os.cpu_count()}, "date": datetime.now(UTC).date().isoformat()}


if __name__ == "__main__":
    main()
