"""The real engine: vLLM's own ASGI application, driven in this process, without a socket.

Chat templates, tools, structured output, logprobs and error texts are vLLM's own. The surface touched is its HTTP
contract, a few functions that `vllm serve` itself is made of, and for capacity and health the engine client.

What the caller brings:

- An event loop: uvloop, as `vllm serve` has it, is a few per cent faster.
- The environment. On a CPU, tensor parallel size 2 needs `VLLM_CPU_OMP_THREADS_BIND="0|1"` (the cores of each
  worker), and a small `--kv-cache-memory-bytes` needs `VLLM_CPU_KVCACHE_SPACE` to be unset. vLLM does not report its
  use unless `VLLM_NO_USAGE_STATS=0` asks for it.
- A supervisor that owns the process group: if this process is killed, vLLM's children stay with their memory.

vllm is imported when an engine starts (seconds), never when this module is imported.
"""

import asyncio
import json
import logging
import os
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from headway.shared.errors import ConfigurationError, frames
from headway.worker.engines.answer import CUT_SHORT, Answer
from headway.worker.engines.base import Capacity, Chunk, Final, Request

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Application = Callable[
    [dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

#: Seconds that vLLM's processes let running requests end after a SIGTERM. vLLM's own 0 aborts them all at once.
SHUTDOWN_TIMEOUT_S = 30

#: Messages that may wait for a slow reader. While the queue is full vLLM merges deltas, so small is right.
QUEUE_SIZE = 4

#: Seconds that vLLM gets to notice that its caller has left; it takes milliseconds.
DISCONNECT_TIMEOUT_S = 5.0


class EngineArgumentsError(ConfigurationError):
    """vLLM's own parser refuses the arguments; the message is vLLM's."""


class EngineStartError(RuntimeError):
    """The engine came up but cannot answer."""


class VllmEngine:
    """Implements `Engine`. Made by `start`."""

    def __init__(self, client: Any, app: Application) -> None:
        self._client = client
        self._app = app

    @classmethod
    @asynccontextmanager
    async def start(cls, argv: Sequence[str]) -> AsyncIterator["VllmEngine"]:
        """Starts an engine that is warm and ready for jobs; leaving the context ends it and its processes.

        Args:
            argv: what would follow `vllm serve`, such as `["--model", path, "--tensor-parallel-size", "2"]`.

        Raises:
            EngineArgumentsError: an unknown flag or a bad value.
            EngineStartError: the engine cannot answer.
        """
        args = parse_arguments(argv)
        _prepare_environment(args)
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

        async with build_async_engine_client(args) as client:
            app = await _application(client, args)
            async with app.router.lifespan_context(app):
                engine = cls(client, app)
                await engine._warm_up()
                yield engine

    @property
    def alive(self) -> bool:
        return not self._client.errored

    @property
    def unfinished(self) -> int:
        """How many sequences vLLM holds, waiting ones included; 0 once a drain is complete."""
        return int(self._client.output_processor.get_num_unfinished_requests())

    def capacity(self) -> Capacity:
        config = self._client.vllm_config
        cache = config.cache_config
        return Capacity(
            slots=config.scheduler_config.max_num_seqs,
            # vLLM's own count knows hybrid models, for which blocks × block size is wrong.
            kv_tokens=cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size,
            max_model_len=config.model_config.max_model_len,
        )

    async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        call = _Call(self._app, request)
        answer: Answer | None = None
        try:
            while (message := await call.next_message()) is not None:
                if answer is None:
                    answer = _begun(message)
                else:
                    for chunk in _take(answer, message):
                        yield chunk
            yield answer.final() if answer else Final(500, CUT_SHORT)
        finally:
            if call.running:
                await call.disconnect()
                # A plain request's handler is cancelled by the disconnect but not awaited by vLLM.
                await self._client.abort(_engine_ids(request))

    async def _warm_up(self) -> None:
        """The first request with logprobs compiles a kernel, for up to 17 s: no job shall wait for that."""
        body = {"prompt": "Hello", "max_tokens": 2, "logprobs": 0}
        async for item in self.run(Request("warm-up", "/v1/completions", body)):
            if isinstance(item, Final) and item.status_code != 200:
                raise EngineStartError(f"the engine answers {item.status_code}: {item.body!r}")


def parse_arguments(argv: Sequence[str]) -> Namespace:
    """vLLM's arguments, with Headway's defaults for those that are not given.

    Raises:
        EngineArgumentsError: an unknown flag or a bad value.
    """
    from vllm.entrypoints.cli.serve import (
        FlexibleArgumentParser,
        make_arg_parser,
        validate_parsed_serve_args,
    )

    def refuse(message: str) -> NoReturn:
        raise EngineArgumentsError(f"vLLM refuses its arguments: {message}")

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = refuse
    parser.set_defaults(shutdown_timeout=SHUTDOWN_TIMEOUT_S, enable_prompt_tokens_details=True)
    args: Namespace = parser.parse_args(list(argv))
    args.model = args.model_tag or args.model
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        refuse(str(error))
    return args


def _prepare_environment(args: Namespace) -> None:
    """What vLLM's processes inherit."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Nobody but this process reaches the application; with a key vLLM would refuse its own worker.
    os.environ.pop("VLLM_API_KEY", None)
    args.api_key = None
    if args.enforce_eager:
        # vLLM compiles its logprobs all the same, which takes up to 17 s and a C++ compiler.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


class _Server:
    """Stands where `vllm serve` has its HTTP server: vLLM sets the flag when the engine has died."""

    should_exit = False


async def _application(client: Any, args: Namespace) -> Any:
    """vLLM's FastAPI application on this engine, as `vllm serve` builds it."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await client.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    app.state.server = _Server()
    return app


class _Call:
    """One HTTP call of an ASGI application in memory."""

    def __init__(self, app: Application, request: Request) -> None:
        self._body = json.dumps(request.body).encode()
        self._sent = False
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUE_SIZE)
        self._task = asyncio.create_task(self._drive(app, request), name=f"vllm {request.id}")

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def next_message(self) -> Message | None:
        """The application's next ASGI message; None once it has returned."""
        message = await self._messages.get()
        if message is None:
            await self._task
        return message

    async def disconnect(self) -> None:
        """Hangs up and waits for the application to return.

        Cancelling the task instead would leave requests that do not stream running.
        """
        self._left.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        await asyncio.wait([self._task], timeout=DISCONNECT_TIMEOUT_S)
        self._task.cancel()

    async def _drive(self, app: Application, request: Request) -> None:
        try:
            await app(_scope(request), self._receive, self._send)
        except Exception as error:
            # Starlette raises again what it has just answered with a 500; an unfinished answer is the reader's.
            log.warning("vLLM's application failed on %s: %s\n%s", request.id, type(error).__name__, frames(error))
        finally:
            if not self._left.is_set():
                await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._left.is_set():
            await self._messages.put(message)


def _scope(request: Request) -> dict[str, Any]:
    """An HTTP scope. It names no ASGI spec version: from 2.4 on, Starlette stops listening for a disconnect."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": request.endpoint,
        "raw_path": request.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"headway"),
            (b"content-type", b"application/json"),
            (b"x-request-id", request.id.encode()),
        ],
        "client": ("headway", 0),
        "server": ("headway", 80),
        "state": {},
    }


def _begun(message: Message) -> Answer:
    """The answer that begins with an application's first ASGI message."""
    return Answer(message["status"], dict(message["headers"]).get(b"content-type", b"").decode("latin-1"))


def _take(answer: Answer, message: Message) -> list[Chunk]:
    """Gives the answer an ASGI message of its body; the chunks in it."""
    chunks = answer.feed(message.get("body", b""))
    if not message.get("more_body", False):
        answer.end()
    return chunks


def _engine_ids(request: Request) -> list[str]:
    """The ids that vLLM gives the parts of a request: one a chat, one a prompt of a completion."""
    if request.endpoint == "/v1/chat/completions":
        return [f"chatcmpl-{request.id}"]
    match request.body.get("prompt"):
        case [str() | list(), *_] as prompts:
            count = len(prompts)
        case _:
            count = 1
    return [f"cmpl-{request.id}-{index}" for index in range(count)]
