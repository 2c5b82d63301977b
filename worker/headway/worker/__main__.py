"""The command `headway worker`: settings → engine → worker; signals; the health endpoint."""

import asyncio
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import click
import uvloop
from prometheus_client import REGISTRY
from pydantic import ValidationError

from headway.shared.errors import ConfigurationError
from headway.shared.lanes import check_bounds
from headway.shared.queue import Queue
from headway.shared.settings import Settings, explain
from headway.worker.batch import Window
from headway.worker.engines.base import Engine
from headway.worker.health import listen, serving_health
from headway.worker.metrics import WorkerMetrics
from headway.worker.worker import Worker

#: The exit status after an engine's death: the supervisor shall start the worker again.
ENGINE_DIED = 70

#: The exit status for a setting that is wrong: to start again cannot help.
MISCONFIGURED = 2


@click.command("worker", context_settings={"ignore_unknown_options": True})
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def main(engine_args: tuple[str, ...]) -> None:
    """Run a worker: takes jobs from Redis and runs them on its engine.

    Every flag of `vllm serve` can follow: headway worker -- --max-num-seqs 64
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It has a line for each request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = Settings()
        status = uvloop.run(serve(settings, engine_args))
    except (ConfigurationError, ValidationError) as error:
        click.echo(f"headway worker: {explain(error)}", err=True)
        status = MISCONFIGURED
    sys.exit(status)


async def serve(settings: Settings, engine_args: tuple[str, ...] = ()) -> int:
    """Runs a worker until SIGTERM or SIGINT, or until its engine dies.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: a setting does not fit the engine.
    """
    stop = _stop_signal()
    # A port that is taken is found before the engine is loaded.
    with listen(settings.health_host, settings.health_port) as listener:
        async with AsyncExitStack() as exits:
            engine = await _unless(stop, exits.enter_async_context(_engine(settings, engine_args)))
            if engine is None:
                return 0
            check_bounds(settings.lanes, engine.capacity().max_model_len)
            async with Queue.of(settings) as queue:
                worker = _worker(settings, queue, engine)
                async with serving_health(worker, listener):
                    await _work(stop, worker, settings.drain_s)
            return 0 if engine.alive else ENGINE_DIED


async def _unless(stop: asyncio.Event, start: Coroutine[Any, Any, Engine]) -> Engine | None:
    """The engine, once it has started; None when a signal came first, since a start may have hours to wait."""
    starting, stopping = asyncio.create_task(start), asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    return None if starting.cancelled() else starting.result()


async def _work(stop: asyncio.Event, worker: Worker, drain_s: float) -> None:
    running = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(_stop_on(stop, worker, drain_s))
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await running


def _engine(settings: Settings, engine_args: tuple[str, ...]) -> AbstractAsyncContextManager[Engine]:
    if settings.engine == "simulated":
        return _simulated(settings)
    if settings.engine == "upstream":
        return _upstream(settings, engine_args)
    from headway.worker.engines.vllm import VllmEngine

    if not settings.model:
        raise ConfigurationError("HEADWAY_MODEL names no model: a folder or a Hugging Face id")
    argv = ["--model", settings.model, "--served-model-name", settings.model_name]
    argv += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if settings.max_model_len:
        argv += ["--max-model-len", str(settings.max_model_len)]
    return VllmEngine.start([*argv, *shlex.split(settings.engine_args), *engine_args])


def _upstream(settings: Settings, engine_args: tuple[str, ...]) -> AbstractAsyncContextManager[Engine]:
    from headway.worker.engines.upstream import Upstream, UpstreamEngine

    if engine_args or settings.engine_args:
        raise ConfigurationError(
            "HEADWAY_ENGINE_ARGS and flags behind the command are for vLLM in this process;"
            " with HEADWAY_ENGINE=upstream they belong to the server that runs elsewhere"
        )
    upstream = Upstream(
        url=settings.upstream_url,
        api_key=settings.upstream_api_key,
        model=settings.upstream_model or settings.model_name,
        served_model=settings.model_name,
        slots=settings.upstream_slots,
        kv_tokens=settings.upstream_kv_tokens,
        max_model_len=settings.max_model_len,
    )
    return UpstreamEngine.start(upstream)


def _simulated(settings: Settings) -> AbstractAsyncContextManager[Engine]:
    from headway.shared.tokens import load_counter
    from headway.worker.engines.simulated import SimulatedEngine
    from headway.worker.engines.step_model import Constants

    counter = load_counter(settings)
    constants = Constants(
        step_s=settings.simulated_step_ms / 1000,
        prefill_token_s=1 / settings.simulated_prefill_tokens_per_s,
        decode_sequence_s=0,
    )
    return SimulatedEngine.start(
        model=settings.model_name,
        slots=settings.simulated_slots,
        kv_tokens=settings.simulated_kv_tokens,
        # The model's KV memory comes in whole blocks.
        max_model_len=settings.max_model_len
        or settings.simulated_kv_tokens // constants.block_tokens * constants.block_tokens,
        constants=constants,
        count=lambda endpoint, body: sum(counter(endpoint, body)),
    )


def _worker(settings: Settings, queue: Queue, engine: Engine) -> Worker:
    return Worker(
        queue,
        engine,
        # Unique a process start: a worker that comes back must not be taken for the one that died.
        name=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        model=settings.model_name,
        lanes=settings.lanes,
        window=Window(settings.batch_max_wait_ms / 1000, settings.batch_max_jobs, settings.batch_max_tokens),
        max_attempts=settings.max_attempts,
        # The registry in which vLLM's own metrics are, too.
        metrics=WorkerMetrics(REGISTRY, [lane.name for lane in settings.lanes]),
    )


def _stop_signal() -> asyncio.Event:
    """Set by SIGTERM, SIGINT and SIGHUP, from now on: one that comes while the engine starts must orphan no process."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # What nohup or a shell has told this process to ignore, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _stop_on(stop: asyncio.Event, worker: Worker, drain_s: float) -> None:
    await stop.wait()
    await worker.stop(drain_s)


if __name__ == "__main__":
    main()
