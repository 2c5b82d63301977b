"""A TCP or Unix proxy before the server that can swallow one answer, as a connection that breaks just then does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class Proxy:
    """Passes everything on, but for two faults.

    After `swallow(text)`, the answer to the next request that holds the text is lost. After `freeze()`, the connections
    that are there stay open and silent; new ones work.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._text: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: set[asyncio.Task[None]] = set()
        self._frozen: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.swallowed = 0

    @classmethod
    @asynccontextmanager
    async def before(cls, url: str, folder: Path) -> AsyncIterator[tuple["Proxy", str]]:
        """A proxy before the server at a `unix://` URL, and the URL of the proxy."""
        proxy = cls(url.removeprefix("unix://"))
        path = folder / "p.sock"
        server = await asyncio.start_unix_server(proxy._accept, path)
        try:
            yield proxy, f"unix://{path}"
        finally:
            server.close()
            for task in proxy._tasks:
                task.cancel()
            await asyncio.gather(*proxy._tasks, *proxy._served, return_exceptions=True)

    def swallow(self, text: bytes) -> None:
        self._text = text

    def freeze(self) -> None:
        self._frozen |= self._open

    def _accept(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        self._served.add(asyncio.create_task(self._serve(client, answer)))

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_unix_connection(self._upstream)
        doomed = asyncio.Event()
        self._open.add(answer)
        tasks = {
            asyncio.create_task(self._requests(client, writer, doomed)),
            asyncio.create_task(self._answers(reader, answer, doomed)),
        }
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self._open.discard(answer)
        for one in (writer, answer):
            one.close()
            with suppress(OSError):
                await one.wait_closed()
        for task in tasks:
            task.cancel()
        self._tasks -= tasks

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self._text is not None and self._text in data:
                    self._text = None
                    doomed.set()
                sink.write(data)
                await sink.drain()

    async def _answers(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if sink in self._frozen:
                    continue
                if doomed.is_set():
                    self.swallowed += 1
                    return  # The server has done it; the client gets a broken connection instead of the answer.
                sink.write(data)
                await sink.drain()
