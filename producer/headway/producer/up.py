"""`headway up`: everything on this machine, until Ctrl-C."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click

from headway.producer.stack import Stack, say
from headway.shared.settings import Settings

SIMULATED = "The engine is SIMULATED: there is no model, and the answers are invented words."


@click.command()
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="What generates the tokens.")
@click.option("--redis/--no-redis", default=True, help="Start the embedded server, or use HEADWAY_REDIS_URL.")
@click.option("--worker/--no-worker", default=True, help="Start a worker, or leave it to `headway worker`.")
def main(engine: str | None, redis: bool, worker: bool) -> None:
    """Start Valkey, the API and one worker here.

    Data, logs and the server's socket are in HEADWAY_DATA_DIR (.headway); Ctrl-C stops everything.
    """
    asyncio.run(_up(stack_settings(engine, redis=redis), worker))


def stack_settings(engine: str | None, *, redis: bool = True, **values: Any) -> Settings:
    """The settings of the environment, with what the command line says.

    Raises:
        pydantic.ValidationError, ConfigurationError: as `Settings`.
    """
    if engine:
        values["engine"] = engine
    if not redis:
        values["redis_url"] = Settings().redis_url
    return Settings(**values)


async def _up(settings: Settings, worker: bool) -> None:
    stack = Stack(settings, worker=worker)
    if stack.settings.engine == "simulated":
        say(SIMULATED, fg="yellow", bold=True)
    async with until_signal(stack), stack:
        _greet(stack)
        await stack.serve()


@asynccontextmanager
async def until_signal(stack: Stack) -> AsyncIterator[None]:
    """SIGINT, SIGTERM or SIGHUP ends the block, whose stack then stops in order.

    The next one kills what is left, but for SIGHUP: a terminal that closes may send it more than once.
    """
    task = asyncio.current_task()
    assert task is not None
    signalled = False

    def interrupt(number: signal.Signals) -> None:
        nonlocal signalled
        if stack.stopping:
            if number != signal.SIGHUP:
                stack.kill()
        elif not signalled:
            signalled = True
            task.cancel()
            grace_s = stack.settings.drain_s
            say(f"Stopping; running jobs get {grace_s:.0f} s to end (again: at once, which leaves them stranded)")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # With nohup, SIGHUP is ignored and shall stay so.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    except asyncio.CancelledError:
        if not signalled:
            raise
        task.uncancel()


def _greet(stack: Stack) -> None:
    settings = stack.settings
    worker = stack.health_url if stack.with_worker else f"none; HEADWAY_REDIS_URL={settings.redis_url} headway worker"
    lines = {
        "API": f"{stack.api_url}/v1 (its documentation: {stack.api_url}/docs)",
        "model": settings.model_name,
        "worker": worker,
        "Redis": without_password(settings.redis_url),
        "data, logs": str(settings.data_dir),
    }
    for name, value in lines.items():
        say(f"  {click.style(f'{name:<11}', bold=True)} {value}")
    say("Ready. Try, in this folder:  headway submit --stream 'What is the capital of France?'")


def without_password(url: str) -> str:
    """The URL without its credentials: the part before `@`, and the query, which may have some too."""
    return re.sub(r"^(\w+://)[^/]*@", r"\1***@", url.partition("?")[0])
