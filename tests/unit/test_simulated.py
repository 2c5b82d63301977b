"""The simulated engine: its step model without a clock, its contract, and the loop under a clock that we turn."""

import asyncio
import json
import selectors
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headway.shared.errors import ConfigurationError
from headway.worker.engines.base import Capacity, Chunk, Engine, Final, Request
from headway.worker.engines.simulated import INSTANT, Constants, SimulatedEngine, token
from headway.worker.engines.simulated_openai import CHAT, COMPLETIONS, FINGERPRINT, WORDS
from headway.worker.engines.step_model import Model, Step

HELLO = [{"role": "user", "content": "Hello"}]


def model(slots: int = 8, kv_tokens: int = 1024, step_tokens: int = 64, block_tokens: int = 4) -> Model:
    constants = Constants(step_tokens=step_tokens, block_tokens=block_tokens)
    return Model(slots=slots, kv_tokens=kv_tokens, constants=constants)


def drain(subject: Model, most: int = 10_000) -> list[Step]:
    steps = []
    while subject.busy:
        steps.append(subject.step())
        assert len(steps) < most, "the model does not come to an end"
    return steps


def tokens_of(sequence: int, steps: list[Step]) -> int:
    return sum(step.tokens.count(sequence) for step in steps)


# --- the model ---


def test_a_sequence_prefills_and_then_decodes_one_token_a_step() -> None:
    # Given a prompt of two step budgets and a half
    subject = model(step_tokens=64)
    sequence = subject.admit(160, 3)
    # If I let it run to its end
    steps = drain(subject)
    # I expect three steps of prefill, the last of which gives the first token, and two of decoding
    assert [step.prefill_tokens for step in steps] == [64, 64, 32, 0, 0]
    assert [step.decoding for step in steps] == [0, 0, 0, 1, 1]
    assert [step.tokens for step in steps] == [(), (), (sequence,), (sequence,), (sequence,)]
    assert [step.finished for step in steps] == [(), (), (), (), (sequence,)]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    # Given a sequence that decodes
    subject = model(step_tokens=64)
    first = subject.admit(4, 10)
    subject.step()
    # If a long prompt joins it
    second = subject.admit(130, 1)
    steps = [subject.step() for _ in range(3)]
    # I expect that the first gets its token in each step and the prompt what remains of the budget
    assert [step.tokens for step in steps] == [(first,), (first,), (first, second)]
    assert [step.prefill_tokens for step in steps] == [63, 63, 4]


def test_a_sequence_waits_while_a_prefill_takes_the_whole_budget() -> None:
    subject = model(step_tokens=16)
    subject.admit(40, 1)
    subject.admit(4, 1)
    subject.step()
    assert (subject.running, subject.waiting) == (1, 1)


def test_a_step_takes_what_its_constants_say() -> None:
    # Given one sequence that decodes and one that comes with 10 prompt tokens
    constants = Constants(step_s=1.0, prefill_token_s=0.01, decode_sequence_s=0.25)
    subject = Model(slots=4, kv_tokens=4096, constants=constants)
    subject.admit(5, 9)
    assert subject.step().duration_s == pytest.approx(1.05)
    subject.admit(10, 9)
    # I expect base + 10 prefill tokens + one decoding sequence
    assert subject.step().duration_s == pytest.approx(1.35)


def test_no_more_sequences_run_than_there_are_slots() -> None:
    # Given two slots and three sequences
    subject = model(slots=2)
    first, second, third = (subject.admit(4, 2) for _ in range(3))
    # If I take a step, I expect that the third waits
    assert subject.step().tokens == (first, second)
    assert (subject.running, subject.waiting) == (2, 1)
    # and that it starts when a slot is free
    assert subject.step().finished == (first, second)
    assert subject.step().tokens == (third,)


def test_the_youngest_is_preempted_when_blocks_run_out_and_still_finishes() -> None:
    # Given KV memory for the prompts of two sequences but not for all that they generate
    subject = model(kv_tokens=48, block_tokens=4)
    old, young = subject.admit(16, 16), subject.admit(16, 16)
    # If they run to their end
    steps = drain(subject)
    # I expect that only the young one is preempted, that it recomputes its prompt and what it had generated,
    assert {sequence for step in steps for sequence in step.preempted} == {young}
    assert sum(step.prefill_tokens for step in steps) > 32 + 16
    # that no token comes twice for that, and that all memory is free again
    assert (tokens_of(old, steps), tokens_of(young, steps)) == (16, 16)
    assert [sequence for step in steps for sequence in step.finished] == [old, young]
    assert subject.kv_tokens_free == 48


def test_a_preempted_sequence_goes_before_those_that_wait() -> None:
    # Given two sequences that outgrow the memory, and a small one for which there is no slot
    subject = model(slots=2, kv_tokens=48, block_tokens=4)
    old, young, waiting = subject.admit(16, 16), subject.admit(16, 16), subject.admit(4, 1)
    # If the young one is preempted, I expect that the small one does not take its slot
    finished = [sequence for step in drain(subject) for sequence in step.finished]
    assert finished.index(old) < finished.index(waiting)
    assert {old, young, waiting} == set(finished)


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    # Given memory that is half taken
    subject = model(kv_tokens=64, step_tokens=16, block_tokens=4)
    first = subject.admit(16, 16)
    subject.step()
    # If a prompt comes whose first chunk would fit, but not the whole of it
    second = subject.admit(52, 4)
    steps = drain(subject)
    # I expect that it starts after the first has ended, and that nothing is preempted
    assert [step.preempted for step in steps] == [()] * len(steps)
    assert [sequence for step in steps for sequence in step.finished] == [first, second]


def test_a_removed_sequence_frees_what_it_holds() -> None:
    # Given one slot, one sequence that runs and one that waits
    subject = model(slots=1)
    running, waiting = subject.admit(8, 100), subject.admit(8, 1)
    subject.step()
    # If the running one is removed, twice
    subject.remove(running)
    subject.remove(running)
    # I expect its memory back, and that the next step serves the other
    assert subject.kv_tokens_free == 1024
    assert subject.step().finished == (waiting,)
    # and the same of one that waits
    subject.remove(subject.admit(8, 1))
    assert not subject.busy


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (1000, 25)])
def test_what_could_never_run_is_not_admitted(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="token"):
        model(kv_tokens=1024).admit(prompt, output)


@pytest.mark.parametrize("settings", [{"slots": 0}, {"slots": 65}, {"kv_tokens": 3}])
def test_a_model_that_could_not_serve_its_slots_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must"):
        model(**settings)


SEQUENCES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12)


@given(
    sequences=SEQUENCES,
    slots=st.integers(1, 6),
    kv_tokens=st.integers(92, 200),
    step_tokens=st.integers(6, 80),
    block_tokens=st.sampled_from([1, 2, 3, 8]),
    arrivals=st.integers(0, 5),
)
def test_whatever_comes_stays_within_bounds_and_finishes(
    sequences: list[tuple[int, int]],
    slots: int,
    kv_tokens: int,
    step_tokens: int,
    block_tokens: int,
    arrivals: int,
) -> None:
    # Given any mix of sequences that arrive some steps apart
    subject = model(slots, kv_tokens, step_tokens, block_tokens)
    wanted, steps = {}, []
    for prompt, output in sequences:
        wanted[subject.admit(prompt, output)] = output
        for _ in range(arrivals):
            steps.append(subject.step())
            assert subject.running <= slots
            assert 0 <= subject.kv_tokens_free <= subject.kv_tokens
    # If I let them run to their end
    steps += drain(subject)
    # I expect that no step exceeds its budget,
    assert all(step.prefill_tokens + step.decoding <= step_tokens for step in steps)
    # that each gets exactly its tokens, never two in one step, and that all memory is free again
    assert {sequence: tokens_of(sequence, steps) for sequence in wanted} == wanted
    assert all(len(set(step.tokens)) == len(step.tokens) for step in steps)
    assert sorted(sequence for step in steps for sequence in step.finished) == sorted(wanted)
    assert subject.kv_tokens_free == subject.kv_tokens


# --- the contract ---


def request(body: dict[str, Any], endpoint: str = CHAT, request_id: str = "job-0-a") -> Request:
    return Request(request_id, endpoint, body)


async def answer(engine: Engine, asked: Request) -> tuple[list[dict[str, Any]], Final]:
    """The data of all chunks, and the final; checks that a final comes once and last."""
    items = [item async for item in engine.run(asked)]
    chunks, final = items[:-1], items[-1]
    assert isinstance(final, Final)
    assert all(isinstance(chunk, Chunk) and json.loads(chunk.raw) == chunk.data for chunk in chunks)
    return [dict(chunk.data) for chunk in chunks if isinstance(chunk, Chunk)], final


async def plain(engine: Engine, asked: Request) -> dict[str, Any]:
    chunks, final = await answer(engine, asked)
    assert (chunks, final.status_code) == ([], 200)
    assert final.body is not None
    return dict(json.loads(final.body))


def expected(request_id: str, choice: int, tokens: int) -> str:
    return "".join(token(request_id, choice, k) for k in range(tokens))


def said(chunks: list[dict[str, Any]], choice: int) -> str:
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
    return "".join(part["text"] if "text" in part else part["delta"]["content"] for part in parts)


def test_tokens_depend_on_nothing_but_their_place() -> None:
    # Given the fixed value of one token, I expect it in this and every other process
    assert token("job-0-a", 0, 0) == token("job-0-a", 0, 0)
    text = expected("job-0-a", 0, 500)
    assert text.startswith(" ")
    assert set(text.split()) == set(WORDS)
    # and other texts for other choices and requests
    assert len({text, expected("job-0-a", 1, 500), expected("job-0-b", 0, 500)}) == 3


async def test_stream_and_plain_answer_and_the_public_function_agree() -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        # Given the same chat asked plainly and as a stream
        asked = {"messages": HELLO, "max_tokens": 30}
        whole = await plain(engine, request(asked))
        chunks, final = await answer(engine, request(asked | {"stream": True}))
    # I expect one text, a role first, and a chunk for each token
    assert whole["choices"][0]["message"]["content"] == said(chunks, 0) == expected("job-0-a", 0, 30)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(chunks) == 31
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 30 + ["length"]
    assert final == Final(200, None)


async def test_answers_have_the_shapes_of_openai_and_say_that_they_are_simulated() -> None:
    async with SimulatedEngine.start(model="m", constants=INSTANT) as engine:
        chat = await plain(engine, request({"messages": HELLO, "model": "m"}))
        text = await plain(engine, request({"prompt": "Hello"}, COMPLETIONS))
        streamed, _ = await answer(engine, request({"messages": HELLO, "stream": True}))
        text_streamed, _ = await answer(engine, request({"prompt": "Hello", "stream": True}, COMPLETIONS))
    answers: list[ChatCompletion | ChatCompletionChunk | Completion] = [
        ChatCompletion.model_validate(chat),
        Completion.model_validate(text),
        *map(ChatCompletionChunk.model_validate, streamed),
        # The types know no running completion: `finish_reason` may not be null, although servers send it so.
        Completion.model_validate(text_streamed[-1]),
    ]
    assert {each.system_fingerprint for each in answers} == {FINGERPRINT}
    assert {each["system_fingerprint"] for each in text_streamed} == {FINGERPRINT}
    assert {each.model for each in answers} == {"m"}
    assert {each.id for each in answers} == {"chatcmpl-job-0-a", "cmpl-job-0-a"}
    # Sixteen tokens are the default
    assert said(streamed, 0) == said(text_streamed, 0) == expected("job-0-a", 0, 16)


@pytest.mark.parametrize(("endpoint", "prompt"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hi"})])
async def test_two_choices_have_each_their_own_text(endpoint: str, prompt: dict[str, Any]) -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        whole = await plain(engine, request(prompt | {"n": 2, "max_tokens": 5}, endpoint))
        streamed = prompt | {"n": 2, "max_tokens": 5, "stream": True}
        chunks, _ = await answer(engine, request(streamed, endpoint))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [said(chunks, 0), said(chunks, 1)] == [expected("job-0-a", 0, 5), expected("job-0-a", 1, 5)]
    assert whole["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(
    ("prompt", "choices", "prompt_tokens"),
    [("12345678", 2, 2), ([7, 8, 9], 2, 3), (["1234", "12345"], 4, 3), ([[1, 2, 3], [4]], 4, 4)],
)
async def test_prompts_may_be_texts_or_token_ids_or_lists_of_them(
    prompt: object, choices: int, prompt_tokens: int
) -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        whole = await plain(engine, request({"prompt": prompt, "n": 2, "max_tokens": 3}, COMPLETIONS))
    assert [choice["text"] for choice in whole["choices"]] == [
        expected("job-0-a", choice, 3) for choice in range(choices)
    ]
    assert whole["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3 * choices,
        "total_tokens": prompt_tokens + 3 * choices,
    }


async def test_usage_comes_last_and_only_if_asked_for() -> None:
    async with SimulatedEngine.start(constants=INSTANT, count=lambda endpoint, body: 42) as engine:
        asked = {"messages": HELLO, "max_completion_tokens": 4, "max_tokens": 9, "stream": True}
        without, _ = await answer(engine, request(asked))
        chunks, _ = await answer(engine, request(asked | {"stream_options": {"include_usage": True}}))
    assert not any("usage" in chunk for chunk in without)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 42, "completion_tokens": 4, "total_tokens": 46}
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_an_interval_merges_all_but_the_first_and_the_last_chunk() -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        asked = {"prompt": "Hi", "max_tokens": 12, "stream": True, "stream_interval": 4}
        chunks, _ = await answer(engine, request(asked, COMPLETIONS))
    # I expect 1 + 4 + 4 + 3 tokens
    assert [len(chunk["choices"][0]["text"].split()) for chunk in chunks] == [1, 4, 4, 3]
    assert said(chunks, 0) == expected("job-0-a", 0, 12)


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param"),
    [
        ("/v1/embeddings", {"input": "x"}, 404, None),
        (CHAT, {"messages": HELLO, "model": "other"}, 404, "model"),
        (CHAT, {"messages": HELLO, "model": 5}, 400, "model"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": "Hello"}, 400, "messages"),
        (CHAT, {"messages": [{"content": "Hello"}]}, 400, "messages"),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
        (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
        (CHAT, {"messages": HELLO, "n": True}, 400, "n"),
        (CHAT, {"messages": HELLO, "max_tokens": "5"}, 400, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "stream": "yes"}, 400, "stream"),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
        (CHAT, {"messages": HELLO, "stream_options": {}}, 400, "stream_options"),
        (CHAT, {"messages": HELLO, "stream": True, "stream_options": 1}, 400, "stream_options"),
        (COMPLETIONS, {"prompt": [1] * 60, "max_tokens": 5}, 400, "input_tokens"),
    ],
)
async def test_what_vllm_refuses_is_refused(
    endpoint: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with SimulatedEngine.start(max_model_len=64, constants=INSTANT) as engine:
        chunks, final = await answer(engine, request(body, endpoint))
    assert (chunks, final.status_code) == ([], status)
    assert final.body is not None
    error = json.loads(final.body)["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert error["message"]
    assert error["type"]


async def test_a_request_may_fill_the_model_to_its_last_token() -> None:
    async with SimulatedEngine.start(max_model_len=64, kv_tokens=64, constants=INSTANT) as engine:
        whole = await plain(engine, request({"prompt": [1] * 60, "max_tokens": 4}, COMPLETIONS))
    assert whole["usage"]["total_tokens"] == 64


# --- the engine ---


async def test_capacity_is_what_was_set_in_whole_blocks() -> None:
    async with SimulatedEngine.start(slots=3, kv_tokens=1030, max_model_len=512) as engine:
        assert engine.capacity() == Capacity(slots=3, kv_tokens=1024, max_model_len=512)


async def test_a_model_longer_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_model_len"):
        async with SimulatedEngine.start(kv_tokens=1024, max_model_len=1025):
            pass


async def test_many_requests_in_little_memory_all_get_their_own_text() -> None:
    # Given memory that holds two whole requests, and twenty at once
    async with SimulatedEngine.start(slots=8, kv_tokens=128, max_model_len=64, constants=INSTANT) as engine:
        asked = {"prompt": [1] * 20, "max_tokens": 40}
        ids = [f"job-0-{number}" for number in range(20)]
        answers = await asyncio.gather(*(plain(engine, request(asked, COMPLETIONS, each)) for each in ids))
        assert [each["choices"][0]["text"] for each in answers] == [expected(each, 0, 40) for each in ids]
        assert (engine.running, engine.waiting, engine.kv_tokens_free) == (0, 0, 128)


async def test_closing_the_iterator_frees_its_sequences_at_once() -> None:
    async with SimulatedEngine.start(slots=2, kv_tokens=32_768, constants=INSTANT) as engine:
        # Given a request whose three choices run and wait
        asked = {"messages": HELLO, "n": 3, "max_tokens": 30_000, "stream": True}
        async with aclosing(engine.run(request(asked))) as stream:
            await anext(stream)
            assert (engine.running, engine.waiting) == (2, 1)
        # I expect nothing of it after the close, and a free engine
        assert (engine.running, engine.waiting, engine.kv_tokens_free) == (0, 0, 32_768)
        assert (await plain(engine, request({"messages": HELLO})))["usage"]["completion_tokens"] == 16


async def test_a_cancelled_reader_frees_its_sequences() -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        # Given a plain request in a task
        reading = asyncio.create_task(plain(engine, request({"messages": HELLO, "max_tokens": 30_000})))
        chunks, _ = await answer(engine, request({"messages": HELLO, "stream": True}, request_id="job-0-b"))
        assert (len(chunks), engine.running) == (17, 1)
        # If the task is cancelled
        reading.cancel()
        await asyncio.wait([reading])
        # I expect that nothing runs any more
        assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_death_ends_what_runs_and_what_comes_with_a_500(stream: bool) -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        # Given a request that runs
        asked = {"messages": HELLO, "max_tokens": 30_000, "stream": stream}
        reading = asyncio.create_task(answer(engine, request(asked)))
        await plain(engine, request({"messages": HELLO}, request_id="job-0-b"))
        assert (engine.alive, engine.running) == (True, 1)
        # If the engine dies
        engine.die()
        chunks, running = await asyncio.wait_for(reading, 10)
        _, late = await answer(engine, request(asked))
        # I expect that it says so, and an error for the running request and for a new one
        assert not engine.alive
        assert (running.status_code, late.status_code) == (500, 500)
        assert json.loads(running.body or b"")["error"]["code"] == 500
        # and that a stream ends where it was, without an end of its own
        assert bool(chunks) == stream
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def test_an_engine_is_dead_after_its_use() -> None:
    async with SimulatedEngine.start() as engine:
        assert engine.alive
    assert not engine.alive


async def test_leaving_the_engine_is_a_death_for_what_still_runs() -> None:
    async with SimulatedEngine.start(constants=INSTANT) as engine:
        stream = engine.run(request({"messages": HELLO, "max_tokens": 30_000, "stream": True}))
        await anext(stream)
    *_, last = [item async for item in stream]
    assert isinstance(last, Final)
    assert last.status_code == 500


async def test_a_step_loop_that_fails_takes_the_engine_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a model with a bug
    def broken(self: Model) -> Step:
        raise ZeroDivisionError

    monkeypatch.setattr(Model, "step", broken)
    # If a request makes it run, I expect a 500 for the request and the bug for the engine's owner
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - it comes at the exit
        async with SimulatedEngine.start(constants=INSTANT) as engine:
            _, final = await answer(engine, request({"messages": HELLO}))
            assert (final.status_code, engine.alive) == (500, False)


class TurnedClock(asyncio.SelectorEventLoop):
    """An event loop whose clock does not run: it jumps to the next timer when nothing else is to do.

    Attributes:
        late: seconds by which each timer comes too late.
    """

    def __init__(self, late: float = 0.0) -> None:
        self.late = late
        self.now = 0.0
        self.timed_waits = 0
        self.idle = asyncio.Event()
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.DefaultSelector):
    def __init__(self, clock: TurnedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            # No timer and nothing ready: the process would sleep until something comes from outside.
            self._clock.idle.set()
        elif timeout > 0:
            self._clock.timed_waits += 1
            self._clock.now += timeout + self._clock.late
        return super().select(0)


def turned(clock: TurnedClock, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(work)


TENTH = Constants(step_s=0.1, prefill_token_s=0, decode_sequence_s=0)


def test_all_requests_share_one_timed_wait_a_step() -> None:
    clock = TurnedClock()

    async def ten_at_once() -> None:
        # Given steps of 100 ms, and ten requests of 20 tokens at once
        async with SimulatedEngine.start(constants=TENTH) as engine:
            asked = {"messages": HELLO, "max_tokens": 20}
            await asyncio.gather(*(plain(engine, request(asked)) for _ in range(10)))
        # I expect 20 steps for all of them, with a wait each
        assert clock.now == pytest.approx(2.0)
        assert clock.timed_waits == 20

    turned(clock, ten_at_once())


def test_late_wake_ups_do_not_add_up() -> None:
    # Given timers that come 10 ms late each
    clock = TurnedClock(late=0.01)

    async def fifty_steps() -> None:
        async with SimulatedEngine.start(constants=TENTH) as engine:
            await plain(engine, request({"messages": HELLO, "max_tokens": 50}))
        # I expect that the fiftieth step of 100 ms is only as late as one timer
        assert clock.now == pytest.approx(5.01)

    turned(clock, fifty_steps())


def test_an_idle_engine_sets_no_timer() -> None:
    clock = TurnedClock()

    async def idle() -> None:
        async with SimulatedEngine.start(constants=TENTH) as engine:
            await plain(engine, request({"messages": HELLO}))
            # If nothing is to do, I expect that the process would sleep until something comes
            clock.idle.clear()
            await clock.idle.wait()
            # and that the time without work delays or hastens nothing afterwards
            clock.now = 1000.0
            await plain(engine, request({"messages": HELLO}))
            assert clock.now == pytest.approx(1001.6)

    turned(clock, idle())
