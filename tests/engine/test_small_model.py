"""The real engine with the small real model: in this process, and behind two servers through the upstream engine.

One vLLM serves all three. A Headway in between is a second one with its own lanes: it answers under its own job's id
and refuses in its own words what its intake knows to be wrong.
"""

import asyncio
import json
import secrets
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from engine.calls import CHAT, COMPLETIONS, error, plain, run, said, until
from headway.api.app import create_app
from headway.shared.metrics import exposition
from headway.shared.queue import Queue
from headway.shared.settings import Settings
from headway.worker.assemble import Assembler, as_stream
from headway.worker.engines.base import Capacity, Request
from headway.worker.engines.upstream import Upstream, UpstreamEngine
from headway.worker.engines.vllm import VllmEngine
from headway.worker.worker import Worker
from monitoring import Page
from programs import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_LEN = 2048

#: A body that would run for a minute, so it is still running whenever a test leaves it.
ENDLESS = {"prompt": "One, two,", "max_tokens": 1800, "ignore_eos": True}


#: Where the engine is.
HERE, UPSTREAM, HEADWAY = "in this process", "behind its own server", "behind a second Headway"
ONLY_HERE = pytest.mark.parametrize("where", [HERE], indirect=True)
VLLMS_OWN = pytest.mark.parametrize("where", [HERE, UPSTREAM], indirect=True)


@pytest.fixture(scope="module", params=[HERE, UPSTREAM, HEADWAY])
def where(request):
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(where, vllm, server):
    """The engine that a worker would have."""
    async with {HERE: in_this_process, UPSTREAM: behind_its_server, HEADWAY: behind_headway}[where](
        vllm, server
    ) as engine:
        yield engine


@asynccontextmanager
async def in_this_process(vllm, server):
    yield vllm


@asynccontextmanager
async def behind_its_server(vllm, server):
    async with serving(vllm._app, lifespan="off") as url, UpstreamEngine.start(upstream(url)) as engine:
        yield engine


@asynccontextmanager
async def behind_headway(vllm, server):
    settings = Settings(
        redis_url=server.url,
        prefix=f"hw-test-{secrets.token_hex(6)}",
        engine="upstream",
        served_model="small",
        max_model_len=MAX_MODEL_LEN,
        short_below=256,
        mid_to=1024,
    )
    async with Queue.of(settings) as queue:
        worker = Worker(queue, vllm, name="second", model="small", lanes=settings.lanes)
        working = asyncio.create_task(worker.run())
        async with serving(create_app(settings)) as url, UpstreamEngine.start(upstream(url)) as engine:
            yield engine
        await worker.stop(0)
        await working


def upstream(url):
    return Upstream(url=url, model="small", served_model="small", slots=16, kv_tokens=5000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(small_model):
    argv = ["--model", str(small_model), "--served-model-name", "small", "--enforce-eager"]
    argv += ["--kv-cache-memory-bytes", str(256 << 20), "--max-model-len", str(MAX_MODEL_LEN)]
    argv += ["--max-num-seqs", "16", "--scheduling-policy", "priority"]
    # Else the second of two equal requests finds its prompt cached, and says so in its usage.
    argv += ["--no-enable-prefix-caching"]
    async with VllmEngine.start(argv) as engine:
        yield engine


async def test_it_knows_the_capital_of_france(engine, where):
    # If I ask the real model a real question
    body = {"messages": said("What is the capital of France?"), "max_tokens": 16, "temperature": 0}
    answer = await plain(engine, CHAT, body)

    # I expect its real answer, under the job's id
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["id"].startswith("chatcmpl-job-0-")
    assert where == HEADWAY or answer["id"] == "chatcmpl-job-0-test"
    assert answer["model"] == "small"


@pytest.mark.parametrize("where", [UPSTREAM, HEADWAY], indirect=True)
async def test_the_upstream_says_how_long_its_context_is(engine):
    assert engine.capacity() == Capacity(16, 5000, MAX_MODEL_LEN)
    assert engine.alive


@ONLY_HERE
async def test_its_capacity_is_the_engines_own(engine):
    # Given 16 slots and 256 MiB for keys and values of 30 layers × 3 heads × 64 × 2 bytes × 2
    # I expect the slots, the tokens that fit, in whole blocks, and the model's length
    capacity = engine.capacity()
    assert capacity == Capacity(16, capacity.kv_tokens, MAX_MODEL_LEN)
    assert capacity.kv_tokens == pytest.approx((256 << 20) / (30 * 3 * 64 * 2 * 2), abs=128)
    assert engine.alive


@ONLY_HERE
async def test_vllms_own_metrics_are_those_that_a_worker_shows(engine):
    # Given vLLM's own page
    async with httpx.AsyncClient(transport=httpx.ASGITransport(engine._app), base_url="http://vllm") as http:
        own = Page((await http.get("/metrics", follow_redirects=True)).text)
    assert "vllm:kv_cache_usage_perc" in own.families

    # I expect the same metrics in the registry to which a worker adds its own
    assert own.families.items() <= Page(exposition(REGISTRY)[0].decode()).families.items()


async def test_a_stream_is_passed_on_byte_by_byte(engine):
    # If I ask for a stream
    body = {"messages": said("Count to five."), "max_tokens": 12, "temperature": 0, "stream": True}
    chunks, final = await run(engine, CHAT, body)

    # I expect each chunk as vLLM wrote it, the text in several pieces, and an empty final
    assert all(json.loads(chunk.raw) == chunk.data for chunk in chunks)
    pieces = [chunk.data["choices"][0]["delta"].get("content") for chunk in chunks]
    assert len([piece for piece in pieces if piece]) > 3
    assert chunks[-1].data["choices"][0]["finish_reason"] == "length"
    assert (final.status_code, final.body) == (200, None)


async def test_two_choices_with_logprobs(engine):
    # If I ask for two choices with logprobs
    answer = await plain(engine, COMPLETIONS, {"prompt": "Once", "max_tokens": 4, "n": 2, "logprobs": 2})

    # I expect both, with a logprob a token
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["token_logprobs"]) == 4 for choice in answer["choices"])


async def test_structured_output(engine):
    # If I ask for JSON of a schema
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    body = {"messages": said("Where is the Colosseum?"), "response_format": wanted, "max_tokens": 64}
    answer = await plain(engine, CHAT, body)

    # I expect JSON of that schema
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")


async def test_a_priority_is_accepted(engine):
    # Given an engine that schedules by priority, if I send one, I expect an answer
    answer = await plain(engine, COMPLETIONS, {"prompt": "One, two,", "max_tokens": 2, "priority": -5})
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": "word " * (2 * MAX_MODEL_LEN)}, "input_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": MAX_MODEL_LEN * 2}, None),
        ({"n": "many"}, None),
    ],
    ids=["too long", "temperature", "max_tokens", "wrong type"],
)
async def test_what_is_wrong_is_refused_in_vllms_words(engine, where, change, param, stream):
    # If I send a body that is wrong in one way, streamed or not
    code, said_error = await error(engine, COMPLETIONS, {"prompt": "Hi", "stream": stream, **change})

    # I expect the status, and an error object before any chunk
    assert code == 400
    assert said_error["message"]
    if where != HEADWAY or "temperature" in change:  # All else a Headway's intake knows before vLLM does.
        assert said_error["code"] == 400
        assert param is None or said_error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_another_model_is_not_there(engine, where, stream):
    # If I name another model, I expect vLLM's 404; an upstream is asked for the model that its worker serves
    _, final = await run(engine, COMPLETIONS, {"prompt": "Hi", "stream": stream, "model": "another", "max_tokens": 1})
    assert final.status_code == (404 if where == HERE else 200)


async def test_an_unknown_route_is_a_404(engine, where):
    # If I post to a route that vLLM has not, I expect its 404; of an upstream that is a failure, and no job's fault
    _, final = await run(engine, "/v1/nothing", {"prompt": "Hi"})
    assert final.status_code == (404 if where == HERE else 502)
    assert engine.alive


@VLLMS_OWN
async def test_leaving_a_stream_aborts_it(engine, vllm, where):
    # Given a stream in mid-run
    async with aclosing(engine.run(Request("job-0-left", COMPLETIONS, {**ENDLESS, "stream": True}))) as items:
        await anext(items)
        assert vllm.unfinished == 1

    # If I have closed its iterator, I expect that vLLM holds nothing, at once
    await gone(vllm, where)


async def gone(vllm, where):
    """vLLM holds nothing; where it has only seen a connection end, it needs a moment to notice."""
    if where != HERE:
        await until(lambda: vllm.unfinished == 0, timeout_s=5)
    assert vllm.unfinished == 0


# A Headway in between does not abort: its job goes on when its caller hangs up.
@VLLMS_OWN
@pytest.mark.parametrize(
    ("endpoint", "body", "sequences"),
    [
        (COMPLETIONS, ENDLESS, 1),
        (COMPLETIONS, {**ENDLESS, "prompt": ["One, two,", "Three, four,"], "n": 2}, 4),
        (CHAT, {"messages": said("Count."), "max_tokens": 1800, "ignore_eos": True, "n": 3}, 3),
    ],
    ids=["one", "two prompts twice", "chat three times"],
)
async def test_cancelling_a_plain_run_aborts_it(engine, vllm, where, endpoint, body, sequences):
    # Given a run without a stream, inside the engine
    running = asyncio.create_task(run(engine, endpoint, body, "job-0-cancelled"))
    await until(lambda: vllm.unfinished == sequences)

    # If I cancel the task that consumes it
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    # I expect that vLLM holds nothing, at once
    await gone(vllm, where)


async def test_a_slow_reader_loses_nothing(engine, vllm, where):
    # Given a stream of 40 tokens, and a reader that takes nothing until vLLM has generated them all
    body = {"prompt": "One, two,", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    fast = await plain(engine, COMPLETIONS, body)
    assembled = Assembler(COMPLETIONS)
    async with aclosing(engine.run(Request("job-0-slow", COMPLETIONS, as_stream(COMPLETIONS, body)))) as items:
        first = await anext(items)
        assembled.add(first.data)
        await until(lambda: vllm.unfinished == 0)

        # If it reads on
        chunks = [item async for item in items][:-1]

    # I expect all of the text, and in this process, where no socket holds chunks for the reader, few of them
    for chunk in chunks:
        assembled.add(chunk.data)
    assert where != HERE or len(chunks) < 20
    assert assembled.answer()["choices"][0]["text"] == fast["choices"][0]["text"]


SYSTEM = {"role": "system", "content": "You are a pirate."}
DIALOGUE = [SYSTEM, *said("Hello!"), {"role": "assistant", "content": "Arr."}, *said("Who are you?")]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}]}]

CORPUS = {
    "chat": (CHAT, {"messages": said("What is two plus two?"), "max_tokens": 24}),
    "chat to its own end": (CHAT, {"messages": said("Say hi."), "max_completion_tokens": 200}),
    "chat with a system prompt and turns": (CHAT, {"messages": DIALOGUE, "max_tokens": 24}),
    "chat in text parts": (CHAT, {"messages": PARTS, "max_tokens": 16}),
    "chat in Japanese": (CHAT, {"messages": said("「猫」を英語で言うと?日本語で答えて。"), "max_tokens": 40}),
    "chat with emoji": (CHAT, {"messages": said("Repeat: 🚂🇫🇷👩‍🔬 naïve café"), "max_tokens": 40}),
    "chat of one token": (CHAT, {"messages": said("Hi"), "max_tokens": 1}),
    "chat with neutral fields": (
        CHAT,
        {"messages": said("Hi"), "max_tokens": 8, "n": 1, "stop": None, "presence_penalty": 0, "user": "me"},
    ),
    "completion": (COMPLETIONS, {"prompt": "The three primary colours are", "max_tokens": 24}),
    "completion of default length": (COMPLETIONS, {"prompt": "Once upon a time"}),
    "completion in Greek": (COMPLETIONS, {"prompt": "Η πρωτεύουσα της Γαλλίας είναι", "max_tokens": 40}),
    "completion with a stop token": (
        COMPLETIONS,
        {"prompt": "1, 2, 3,", "max_tokens": 40, "stop_token_ids": [28], "repetition_penalty": 1.1},
    ),
    "completion with an empty text": (
        COMPLETIONS,
        {"prompt": "1, 2, 3,", "max_tokens": 40, "logit_bias": {"2": 100}},
    ),
    "completion sampled narrowly": (COMPLETIONS, {"prompt": "A B C D", "max_tokens": 16, "top_k": 1}),
}


@pytest.mark.parametrize("name", CORPUS)
async def test_the_assembled_answer_is_vllms_own(engine, where, name):
    # Given a body that can be continued, and vLLM's plain answer to it
    endpoint, body = CORPUS[name]
    body = {"temperature": 0, **body}
    own = await plain(engine, endpoint, body)

    # If I run it as a stream and assemble the answer
    chunks, final = await run(engine, endpoint, as_stream(endpoint, body))
    assembled = Assembler(endpoint)
    for chunk in chunks:
        assembled.add(chunk.data)

    # I expect the same answer, field by field and in the same order; only the second of its creation may differ
    assert final.status_code == 200
    answer = assembled.answer()
    answer["created"] = own["created"]
    if where == HEADWAY:  # Its two jobs have an id each.
        answer["id"] = own["id"]
    assert json.dumps(answer) == json.dumps(own)
