"""What `headway up` runs: a Valkey server, the API and one worker, as child processes that it owns."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import click
import httpx

from headway.producer.child import Child
from headway.producer.embedded import (
    MODEL_FOLDER,
    changed,
    data_folder,
    embedded_settings,
    socket_path,
    valkey_command,
)
from headway.producer.local import environment, leave
from headway.shared.errors import ConfigurationError, HeadwayError, QueueUnavailable
from headway.shared.queue import Queue
from headway.shared.settings import Settings

#: Seconds between two looks whether a child is ready.
_POLL_S = 0.1

#: Seconds after which a long start says that it is still going on.
_STILL_S = 15.0

#: Seconds that a child gets to end, on top of its own grace.
_STOP_S = 10.0

#: Seconds before a child that died is started again: doubled at each death, forgotten after a steady while.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, _STEADY_S = 1.0, 30.0, 60.0


def say(text: str, **style: Any) -> None:
    """Prints a line; once nobody reads stdout any more, it goes nowhere, and what runs here runs on."""
    try:
        click.secho(text, **style)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class ChildFailed(HeadwayError):
    """A child ended before it was ready; the message has the last lines of its log."""


class Stack:
    """The whole of Headway on this machine; `async with` starts it and stops it.

    A child that dies is started again, with a growing pause. When this process dies, its children end too.
    """

    def __init__(self, settings: Settings, *, worker: bool = True, say: Callable[[str], None] = say) -> None:
        """
        Args:
            settings: without a `redis_url` of its own, an embedded server is started; port 0 means any free one.
            worker: False leaves the worker out.
            say: is told each step.
        """
        self._folder = settings.data_dir.absolute()
        self.settings = changed(embedded_settings(settings), data_dir=self._folder)
        self.stopping = False
        self._with_server = "redis_url" not in settings.model_fields_set
        self.with_worker = worker
        self._say = say
        self._children: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._exits = ExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def api_url(self) -> str:
        return _url(self.settings.api_host, self.settings.api_port)

    @property
    def health_url(self) -> str:
        return _url(self.settings.health_host, self.settings.health_port) + "/health"

    async def start(self) -> None:
        """Starts everything and returns when it answers.

        Raises:
            AlreadyRunning: another stack uses the data folder.
            ChildFailed: a child ended before it was ready.
            ConfigurationError: a setting is wrong, or a port is taken.
        """
        lock = self._exits.enter_context(data_folder(self._folder))
        self._take_ports()
        if self._with_server:
            await self._start_server(lock)
        await self._prepare_model()
        await self._start_services()
        self._exits.callback(leave(self.settings).unlink, missing_ok=True)
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]

    async def serve(self) -> None:
        """Keeps the children alive, until it is cancelled."""
        await asyncio.gather(*self._keepers)

    async def stop(self) -> None:
        """The worker goes first, since it drains into the queue; the queue's server goes last."""
        self.stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        for child in reversed(self._children):
            grace_s = {"worker": self.settings.drain_s, "api": self.settings.api_grace_s}.get(child.name, 0)
            await child.stop(_STOP_S + grace_s)
        self._exits.close()

    def kill(self) -> None:
        """Kills all children at once."""
        for child in self._children:
            child.kill()

    def _take_ports(self) -> None:
        at = self.settings
        # Both are held at once, so that they cannot be the same.
        with (
            _free_port(at.api_host, at.api_port, "HEADWAY_API_PORT") as api,
            _free_port(at.health_host, at.health_port, "HEADWAY_HEALTH_PORT") as health,
        ):
            self.settings = changed(at, api_port=api, health_port=health)

    async def _start_server(self, lock: int) -> None:
        path = self._exits.enter_context(socket_path(self._folder))
        self.settings = changed(self.settings, redis_url=f"unix://{quote(str(path))}")
        server = self._child("valkey", valkey_command(self._folder, path), keep_open=lock)
        await server.start()
        async with Queue.connect(self.settings.redis_url) as queue:
            await self._until(server, partial(_answers, queue))

    async def _prepare_model(self) -> None:
        target = MODEL_FOLDER.absolute()
        if self.settings.engine != "vllm" or self.settings.model != str(target) or (target / "config.json").exists():
            return
        self._say("Preparing the small model, once")
        command = _python("headway.producer", "model", "fetch", "--target", str(target))
        fetch = self._child("model", command)
        self._children.remove(fetch)
        try:
            await fetch.start()
            if await fetch.ended() != 0:
                raise ChildFailed(f"the model could not be prepared:\n{fetch.tail()}")
        finally:
            fetch.kill()

    async def _start_services(self) -> None:
        api = self._child("api", _python("headway.api"))
        probes = [(api, self.api_url + "/ready")]
        if self.with_worker:
            probes.append((self._child("worker", _python("headway.worker")), self.health_url))
        if self.with_worker and self.settings.engine == "vllm":
            self._say("Starting the API and the worker; vLLM needs about half a minute")
        for child, _ in probes:
            await child.start()
        async with httpx.AsyncClient(trust_env=False) as http:
            await _together(*(self._until(child, partial(_is_ok, http, url)) for child, url in probes))

    def _child(self, name: str, command: list[str], keep_open: int | None = None) -> Child:
        log = self._folder / "logs" / f"{name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))  # What went wrong last time can still be read.
        variables = {**os.environ, **environment(self.settings), "PYTHONUNBUFFERED": "1"}
        descriptors = [] if keep_open is None else [keep_open]
        child = Child(name, command, log, environment=variables, keep_open=descriptors)
        self._children.append(child)
        return child

    async def _until(self, child: Child, ready: Callable[[], Awaitable[bool]]) -> None:
        ended = asyncio.create_task(child.ended())
        try:
            begun = told = time.monotonic()
            while not await ready():
                await asyncio.wait([ended], timeout=_POLL_S)
                if ended.done():
                    raise ChildFailed(f"{child.name} ended with status {ended.result()}:\n{child.tail()}")
                if time.monotonic() - told > _STILL_S:
                    told = time.monotonic()
                    self._say(f"… {child.name} is starting since {told - begun:.0f} s (its log: {child.log})")
        finally:
            ended.cancel()

    async def _keep(self, child: Child) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            begun = time.monotonic()
            status = await child.ended()
            if time.monotonic() - begun > _STEADY_S:
                backoff_s = _FIRST_BACKOFF_S
            self._say(f"{child.name} ended with status {status}; it is started again in {backoff_s:.0f} s")
            await asyncio.sleep(backoff_s)
            await child.start()
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)


def _python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]


def _url(host: str, port: int) -> str:
    """Where a server on this machine is reached that listens on the host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _free_port(host: str, port: int, setting: str) -> Iterator[int]:
    """Holds the port, any free one for 0, during the block."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            raise ConfigurationError(f"{setting}={port}: {host}:{port} cannot be used ({error.strerror})") from error
        yield int(probe.getsockname()[1])


async def _together(*steps: Coroutine[Any, Any, None]) -> None:
    """Runs all steps; the first error ends the others."""
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _answers(queue: Queue) -> bool:
    with suppress(QueueUnavailable):
        await queue.ping()
        return True
    return False


async def _is_ok(http: httpx.AsyncClient, url: str) -> bool:
    with suppress(httpx.HTTPError):
        return (await http.get(url)).is_success
    return False
