"""The synchronous client: the asynchronous one, on an event loop in a thread of its own."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal

from headway.producer.client import AsyncClient, AsyncJobHandle
from headway.shared.settings import Settings

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class _Blocking(Generic[A]):
    """Something asynchronous, and the portal to the loop on which it lives."""

    def __init__(self, portal: BlockingPortal, inner: A) -> None:
        self._portal = portal
        self._inner = inner


class _Forward(Generic[A, P, R, S]):
    """A method that calls its asynchronous twin on the loop and hands on what `turn` makes of the answer."""

    def __init__(
        self, twin: Callable[Concatenate[A, P], R], turn: Callable[[BlockingPortal, Callable[[], R]], S]
    ) -> None:
        self._twin = twin
        self._turn = turn
        self.__doc__ = twin.__doc__

    def __get__(self, instance: _Blocking[A], owner: type | None = None) -> Callable[P, S]:
        def method(*args: P.args, **kwargs: P.kwargs) -> S:
            return self._turn(instance._portal, lambda: self._twin(instance._inner, *args, **kwargs))

        method.__doc__ = self.__doc__
        return method if instance is not None else cast("Any", self)


def _call(portal: BlockingPortal, start: Callable[[], Awaitable[R]]) -> R:
    """Runs it on the loop; Ctrl-C ends it there before it goes on here."""
    ended = Event()

    async def call() -> R:
        try:
            return await start()
        finally:
            ended.set()

    future = portal.start_task_soon(call)
    try:
        return future.result()
    except BaseException:
        if future.cancel():
            ended.wait()
        raise


def _iterate(portal: BlockingPortal, start: Callable[[], AsyncGenerator[R, None]]) -> Iterator[R]:
    items = start()
    done = object()

    async def following() -> Any:
        return await anext(items, done)

    try:
        while (item := _call(portal, following)) is not done:
            yield item
    finally:
        # The portal of a client that has ended runs no more, and its loop has closed what was left open.
        with suppress(RuntimeError):
            portal.call(items.aclose)


class JobHandle(_Blocking[AsyncJobHandle]):
    """A job, wherever it runs; each verb blocks, and else does what it does on `AsyncJobHandle`."""

    @property
    def id(self) -> str:
        return self._inner.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    status = _Forward(AsyncJobHandle.status, _call)
    cancel = _Forward(AsyncJobHandle.cancel, _call)
    result = _Forward(AsyncJobHandle.result, _call)
    follow = _Forward(AsyncJobHandle.follow, _iterate)
    stream = _Forward(AsyncJobHandle.stream, _iterate)
    text = _Forward(AsyncJobHandle.text, _iterate)


def _call_for_job(portal: BlockingPortal, start: Callable[[], Awaitable[AsyncJobHandle]]) -> JobHandle:
    return JobHandle(portal, _call(portal, start))


class Client(_Blocking[AsyncClient]):
    """Submits jobs and finds them again, for code that is not asynchronous; may be used by many threads."""

    @classmethod
    @contextmanager
    def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> Iterator[Self]:
        """As `AsyncClient.connect`."""
        with (
            start_blocking_portal("asyncio") as portal,
            portal.wrap_async_context_manager(AsyncClient.connect(url, settings=settings)) as client,
        ):
            yield cls(portal, client)

    submit = _Forward(AsyncClient.submit, _call_for_job)

    def job(self, job_id: str) -> JobHandle:
        """As `AsyncClient.job`."""
        return JobHandle(self._portal, self._inner.job(job_id))
