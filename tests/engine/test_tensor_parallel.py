"""The real engine in two worker processes (tensor parallel size 2), and what happens when it dies."""

import os
import signal
from contextlib import aclosing

import psutil
import pytest
import pytest_asyncio

import tiny_model
from engine.calls import CHAT, COMPLETIONS, plain, run, said
from headway.worker.engines.base import Chunk, Final, Request
from headway.worker.engines.vllm import VllmEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("Hello", "The quick brown fox", "1 2 3 4 5 6 7 8", "naïve café 🚂", "x" * 300)


def start(model, *flags):
    argv = ["--model", str(model), "--enforce-eager", "--block-size", "32"]
    return VllmEngine.start([*argv, "--kv-cache-memory-bytes", str(64 << 20), *flags])


def children(word):
    """vLLM names its processes for what they are."""
    return [child for child in psutil.Process().children(recursive=True) if word in " ".join(child.cmdline())]


async def greedy_texts(engine):
    bodies = [{"prompt": prompt, "max_tokens": 32, "temperature": 0} for prompt in PROMPTS]
    return [(await plain(engine, COMPLETIONS, body))["choices"][0]["text"] for body in bodies]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model):
    """What an engine of size 1 says; it is closed before the engine of size 2 starts."""
    async with start(model) as engine:
        return len(children("Worker")), await greedy_texts(engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model, alone):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
        async with start(model, "--tensor-parallel-size", "2") as engine:
            yield engine


async def test_two_worker_processes_run(engine, alone):
    # Given an engine of size 1 that had one worker process, I expect two in an engine of size 2
    workers_alone, _ = alone
    assert workers_alone == 1
    assert len(children("Worker")) == 2


async def test_the_greedy_text_is_that_of_one(engine, alone):
    # If I run the same prompts, I expect the text that an engine of size 1 gave, and not always the same
    _, texts_alone = alone
    assert len(set(texts_alone)) > 1
    assert await greedy_texts(engine) == texts_alone


async def test_a_chat_runs(engine):
    # If I chat with it, I expect as many tokens as I asked for
    body = {"messages": said("Hello"), "max_tokens": 8, "ignore_eos": True}
    assert (await plain(engine, CHAT, body))["usage"]["completion_tokens"] == 8


async def test_its_death_is_seen_and_is_no_answer(engine):
    # Given a stream in mid-run
    endless = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with aclosing(engine.run(Request("job-0-dying", COMPLETIONS, endless))) as items:
        assert isinstance(await anext(items), Chunk)

        # If the engine's process is killed
        (core,) = children("EngineCore")
        core.send_signal(signal.SIGKILL)
        rest = [item async for item in items]

    # I expect a server error as the stream's end, an engine that says it is dead, and the same for new requests
    assert isinstance(rest[-1], Final)
    assert rest[-1].status_code >= 500
    assert not engine.alive
    _, final = await run(engine, COMPLETIONS, {"prompt": "Hello"})
    assert final.status_code >= 500
