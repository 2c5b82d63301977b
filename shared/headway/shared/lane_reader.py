"""Reading lanes: a worker's own connection, used by one loop, for reads that may block."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, NoScriptError, ReadOnlyError, RedisError, ResponseError

from headway.shared.autopipeline import AutoPipeline
from headway.shared.connect import Command, ask, reach
from headway.shared.errors import QueueUnavailable
from headway.shared.job import Ticket, shard_of
from headway.shared.keys import GROUP, Keys
from headway.shared.scripts import script

#: Seconds that one blocking read waits at most, so that a wake-up that Redis refuses is only late.
MAX_BLOCK_S = 2.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Seconds between two looks for lanes of earlier bounds.
_LOOK_S = 1.0

#: Seconds between two tries to wake a read that has not reached the server yet.
_WAKE_AGAIN_S = 0.005


class LaneReader:
    """Takes entries from the lanes of one model, `returned` first, then by tier.

    A read whose answer was lost has made entries this worker's though it does not know them. So a broken read is never
    repeated blindly: it raises, and `recover` then gives all entries that are this worker's.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        pipeline: AutoPipeline,
        keys: Keys,
        shard: str,
        worker: str,
        model: str,
    ) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._keys = keys
        self._shard = shard
        self._worker = worker
        self._model = model
        self._grouped: set[str] = set()
        self._found: set[str] = set()
        self._looked_at = -_LOOK_S
        self._client: int | None = None
        self._blocked_client: int | None = None
        self._wake_wanted = False

    async def lanes(self, known: Iterable[str]) -> list[str]:
        """The names of all lanes that may hold jobs of this model: the known ones, and what earlier bounds have left.

        Those are looked for once a second, since others than the known ones are rare.

        Raises:
            QueueUnavailable: the server could not be reached.
        """
        known = tuple(known)
        if time.monotonic() - self._looked_at >= _LOOK_S:
            members = await self._pipeline.command("SMEMBERS", self._keys.lanes(self._shard))
            pairs = [member.decode().rpartition(":") for member in members]
            self._found = {lane for model, _, lane in pairs if model == self._model}
            self._looked_at = time.monotonic()
        names = [*known, *sorted(self._found.difference(known))]
        await self._make_groups(names)
        return names

    async def read(self, rooms: Mapping[str, int], most: int | None = None) -> list[Ticket]:
        """Waiting entries, lane by lane, without waiting.

        Args:
            rooms: how many of each lane.
            most: how many in all; None for no bound.

        Raises:
            QueueUnavailable: the answer was lost; call `recover`.
        """
        lanes = [self._keys.lane_streams(self._shard, self._model, lane) for lane in rooms]
        keys = [stream for streams in lanes for stream in streams]
        most = sum(rooms.values()) if most is None else most
        args: list[str | int] = [GROUP, self._worker, most, len(lanes[0]), *rooms.values()]
        return await self._tickets(await self._safely(self._script("read", keys, args)))

    async def wait(self, lanes: Iterable[str], timeout_s: float | None) -> list[Ticket]:
        """Waits until a lane has an entry; at most one of each stream comes.

        Empty after `wake`, after the timeout, which is exact, and in any case after `MAX_BLOCK_S` seconds.

        Raises:
            QueueUnavailable: the answer was lost; call `recover`.
        """
        streams = {s: ">" for lane in lanes for s in self._keys.lane_streams(self._shard, self._model, lane)}
        deadline = asyncio.get_running_loop().time() + (MAX_BLOCK_S if timeout_s is None else timeout_s)
        await self._safely(self._connected())
        timer = asyncio.create_task(self._wake_at(deadline))
        try:
            if self._wake_wanted:
                return []
            self._blocked_client = self._client
            return await self._xreadgroup(streams, 1, min(MAX_BLOCK_S, timeout_s or MAX_BLOCK_S))
        finally:
            self._blocked_client = None
            self._wake_wanted = False
            timer.cancel()

    async def wake(self) -> None:
        """Ends the `wait` that is going on; without one, the next ends at once, for it may have been on its way."""
        self._wake_wanted = True
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_BLOCK_S):
                await self._unblock()

    async def recover(self, lanes: Iterable[str]) -> list[Ticket]:
        """All entries that are this worker's, those that it runs included.

        Raises:
            QueueUnavailable: the server could not be reached.
        """
        streams = {s: "0" for lane in lanes for s in self._keys.lane_streams(self._shard, self._model, lane)}
        return await self._xreadgroup(streams, None)

    async def _unblock(self) -> None:
        while (client := self._blocked_client) is not None:
            with suppress(ResponseError, QueueUnavailable):
                if await self._pipeline.command("CLIENT", "UNBLOCK", client, "TIMEOUT"):
                    return
            await asyncio.sleep(_WAKE_AGAIN_S)

    async def _wake_at(self, deadline: float) -> None:
        # The server looks at its blocked clients ten times a second only, so its own BLOCK is up to 100 ms late.
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        await self.wake()

    async def _make_groups(self, lanes: Iterable[str]) -> None:
        for lane in lanes:
            for stream in self._keys.lane_streams(self._shard, self._model, lane):
                if stream not in self._grouped:
                    await self._make_group(stream)
                    self._grouped.add(stream)

    async def _make_group(self, stream: str) -> None:
        try:
            await self._pipeline.command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM", "ENTRIESREAD", 0)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise QueueUnavailable(f"Redis: {error}") from error

    async def _xreadgroup(self, streams: dict[str, str], count: int | None, block_s: float = 0) -> list[Ticket]:
        options: list[str | int] = [] if count is None else ["COUNT", count]
        if block_ms := round(1000 * block_s):  # BLOCK 0 would mean for ever.
            options += ["BLOCK", block_ms]
        command = ["XREADGROUP", "GROUP", GROUP, self._worker, *options, "STREAMS", *streams, *streams.values()]
        answer = await self._safely(self._ask(command))
        return await self._tickets((stream, entry, flat) for stream, found in answer or () for entry, flat in found)

    async def _script(self, name: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        lua = script(name)
        command = ("EVALSHA", lua.sha, len(keys), *keys, *args)
        try:
            return await self._ask(command)
        except NoScriptError:
            # Nothing has been done, so that this may be repeated.
            await self._ask(("SCRIPT", "LOAD", lua.text))
            return await self._ask(command)

    async def _ask(self, command: Command) -> Any:
        await self._connected()
        (answer,) = await ask(self._connection, [command])
        if isinstance(answer, RedisError):
            raise answer
        return answer

    async def _connected(self) -> None:
        """Connects if need be, and learns by which name it can be woken; None where an ACL keeps that secret."""
        if not self._connection.is_connected:
            await reach(self._connection)
            (answer,) = await ask(self._connection, [("CLIENT", "ID")])
            if isinstance(answer, RedisError) and not isinstance(answer, NoPermissionError):
                await self._connection.disconnect()
                raise answer
            self._client = None if isinstance(answer, NoPermissionError) else int(answer)

    async def _tickets(self, entries: Iterable[tuple[bytes, bytes, Sequence[bytes] | None]]) -> list[Ticket]:
        return [ticket for one in entries if (ticket := await self._ticket(*one))]

    async def _ticket(self, stream: bytes, entry: bytes, flat: Sequence[bytes] | None) -> Ticket | None:
        """None for an entry that no script has written, or that is deleted already: it is dropped."""
        try:
            return _decode(stream, entry, flat or ())
        except (KeyError, ValueError):
            _log.error("dropped the malformed entry %s of %s", entry.decode(), stream.decode())
            await self._pipeline.command("XACK", stream, GROUP, entry)
            await self._pipeline.command("XDEL", stream, entry)
            return None

    async def _safely(self, work: Awaitable[_T]) -> _T:
        try:
            return await work
        except RedisError as error:
            if isinstance(error, ReadOnlyError):
                # A demoted master keeps its clients; only a new connection finds the new one behind the same name.
                await self._connection.disconnect()
            # NOGROUP: the server has lost the groups, in a failover or by FLUSHALL; make them again.
            self._grouped.clear()
            self._looked_at = -_LOOK_S
            raise QueueUnavailable(f"Redis: {error}") from error


def _decode(stream: bytes, entry: bytes, flat: Sequence[bytes]) -> Ticket:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    name, job_id = stream.decode(), fields[b"job"].decode()
    shard_of(job_id)
    return Ticket(
        job_id=job_id,
        stream=name,
        entry=entry.decode(),
        lane=name.split(":")[-2],
        prompt_tokens=int(fields[b"prompt_tokens"]),
        reserve_tokens=int(fields[b"reserve_tokens"]),
        choices=int(fields[b"choices"]),
    )
