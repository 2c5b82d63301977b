"""Headway's own programs for end-to-end tests: as processes that can be killed, or inside the test's loop."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

import uvicorn

from helpers import PATIENCE_S, eventually

ROOT = Path(__file__).parents[1]

#: The simulated model of the end-to-end tests, and its context in tokens.
MODEL = "simulated"
MAX_MODEL_LEN = 2000


@dataclass(frozen=True)
class Stack:
    """What runs for a whole session: two APIs that serve one queue, and a worker.

    Attributes:
        settings: what they run with, for further programs of the kind.
        api: the URL of one API process.
        other: the URL of the other.
    """

    settings: dict[str, str]
    api: str
    other: str


class Program:
    """`python -m <module>` with settings; its log is read while it runs."""

    def __init__(self, module: str, settings: Mapping[str, str]) -> None:
        """
        Args:
            settings: HEADWAY_* variables, without the prefix; nothing is inherited from the caller's environment.
        """
        outside = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        paths = os.pathsep.join(str(ROOT / unit) for unit in ("api", "producer", "shared", "worker"))
        named = {f"HEADWAY_{name}": value for name, value in settings.items()}
        self.log: list[str] = []
        self._ended = Event()
        self._found = Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**outside, "PYTHONPATH": paths, **named},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_log(self, text: str) -> str:
        """The first line of the log that contains the text.

        Raises:
            TimeoutError: there was none in time, or the program has ended without it; the log is in the message.
        """
        for _ in range(1000):
            for line in tuple(self.log):
                if text in line:
                    return line
            if self._ended.is_set() or not self._found.wait(PATIENCE_S):
                break
            self._found.clear()
        raise TimeoutError("".join(self.log))

    def stop(self) -> int:
        """Ends it by SIGTERM; its exit status."""
        self._process.terminate()
        return self.wait()

    def kill(self) -> int:
        """Ends it by SIGKILL, as a crash would."""
        self._process.kill()
        return self.wait()

    def wait(self) -> int:
        """Its exit status, when it ends by itself; killed if it does not."""
        try:
            return self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line)
                self._found.set()
        self._ended.set()
        self._found.set()


class ApiProgram(Program):
    """The API as a process of its own, on a port that the system chose.

    Attributes:
        url: where it listens.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__("headway.api", {"API_PORT": "0", **settings})
        try:
            self.url = self.wait_for_log("Uvicorn running on").split(" on ")[1].split()[0]
        except TimeoutError:
            self.kill()
            raise


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the test runner's."""
        yield


@asynccontextmanager
async def serving(app: Any, *, lifespan: Literal["on", "off"] = "on") -> AsyncIterator[str]:
    """The ASGI app behind a real server in this loop; gives its URL.

    Args:
        lifespan: off for an app whose owner has started it.
    """
    server = _Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1, lifespan=lifespan))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or task.done())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
