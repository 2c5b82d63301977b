"""Auto-pipelining: all commands of a process that are waiting at one moment travel together, on one connection."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from headway.shared.connect import ask
from headway.shared.errors import QueueClosed, QueueUnavailable
from headway.shared.scripts import Script, script

#: Commands and bytes in one pipeline at most (one larger command goes alone): a crowd shall not hold up the next for
#: long, and redis-py gives the whole of a pipeline 5 s to be written.
MAX_COMMANDS = 500
MAX_BYTES = 2**20

#: How a server says that it cannot take writes now; the caller may come again. redis-py has a class for some codes
#: and leaves the others in front of the text.
_UNAVAILABLE = (ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_UNAVAILABLE_CODES = ("BUSY ", "MISCONF", "NOREPLICAS")


@dataclass(slots=True, eq=False)
class _Call:
    command: list[bytes]
    script: Script | None = None
    answer: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def size(self) -> int:
        return sum(map(len, self.command))


class AutoPipeline:
    """Sends commands one pipeline after the other; what is asked for meanwhile waits for the next one.

    So a process needs one connection whatever the number of its tasks, and a worker's appends of one moment are one
    round trip. A command may be sent twice when its connection breaks, so each must be safe to repeat.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._waiting: list[_Call] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._pump = asyncio.create_task(self._run(), name="autopipeline")

    async def command(self, *command: Any) -> Any:
        """Sends one command.

        Raises:
            QueueUnavailable: the server could not be reached or takes no writes now.
            redis.ResponseError: the server refused the command itself.
            TypeError, UnicodeEncodeError: a part of the command is nothing that Redis takes.
        """
        return await self._ask(_Call(_encode(command)))

    async def script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Runs the script `lua/<name>.lua`; same errors as `command`."""
        lua = script(name)
        return await self._ask(_Call(_encode(("EVALSHA", lua.sha, len(keys), *keys, *args)), lua))

    async def aclose(self) -> None:
        """Ends the pump; what still waits, or comes later, gets QueueClosed."""
        # redis-py sends under asyncio.wait_for, which in Python 3.11 loses a cancellation that comes as it returns.
        self._closing = True
        self._pump.cancel()
        with suppress(asyncio.CancelledError):
            await self._pump
        _fail(self._waiting, QueueClosed("the connection is closed"))
        await self._connection.disconnect()

    async def _ask(self, call: _Call) -> Any:
        if self._pump.done():
            raise QueueClosed("the connection is closed")
        self._waiting.append(call)
        self._wake.set()
        return await call.answer

    async def _run(self) -> None:
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and not self._closing:
                # One turn of the loop, so that tasks woken by the same event travel together.
                await asyncio.sleep(0)
                await self._answer(self._next_pipeline())

    def _next_pipeline(self) -> list[_Call]:
        sizes = accumulate(call.size for call in self._waiting[:MAX_COMMANDS])
        count = max(1, sum(size <= MAX_BYTES for size in sizes))
        calls, self._waiting = self._waiting[:count], self._waiting[count:]
        return calls

    async def _answer(self, calls: list[_Call]) -> None:
        try:
            for call, answer in zip(calls, await self._send(calls), strict=True):
                _resolve(call, answer)
        except asyncio.CancelledError:
            _fail(calls, QueueClosed("the connection is closed"))
            raise
        except Exception as error:  # The pump must outlive whatever happens to one pipeline.
            _fail(calls, _translate(error))

    async def _send(self, calls: list[_Call]) -> list[Any]:
        answers = await self._ask_for(calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            texts = {lua.text for i in unknown if (lua := calls[i].script)}
            loaded = await ask(self._connection, [("SCRIPT", "LOAD", text) for text in texts])
            refused = next((answer for answer in loaded if isinstance(answer, RedisError)), None)
            again = [refused] * len(unknown) if refused else await self._ask_for([calls[i] for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        if any(isinstance(answer, ReadOnlyError) for answer in answers):
            # A demoted master keeps its clients; only a new connection finds the new one behind the same name.
            await self._connection.disconnect()
        return answers

    async def _ask_for(self, calls: list[_Call]) -> list[Any]:
        return await ask(self._connection, [call.command for call in calls])


def _encode(command: Iterable[Any]) -> list[bytes]:
    # Here and not in redis-py, where one part that it cannot encode would fail a whole pipeline of innocent commands.
    return [part if isinstance(part, bytes) else _text(part).encode() for part in command]


def _text(part: Any) -> str:
    if isinstance(part, bool) or not isinstance(part, str | int | float):
        raise TypeError(f"Redis takes no {type(part).__name__}")
    return str(part)


def _translate(error: Exception) -> Exception:
    if not isinstance(error, RedisError | OSError):
        return error
    final = isinstance(error, ResponseError) and not isinstance(error, _UNAVAILABLE)
    if final and not str(error).startswith(_UNAVAILABLE_CODES):
        return error
    return QueueUnavailable(f"Redis: {error}")


def _resolve(call: _Call, answer: Any) -> None:
    if call.answer.done():
        return
    if isinstance(answer, RedisError):
        call.answer.set_exception(_translate(answer))
    else:
        call.answer.set_result(answer)


def _fail(calls: list[_Call], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(error)
