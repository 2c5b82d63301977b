"""How a job ends, from what its engine said."""

import json
from types import SimpleNamespace

import pytest

from engine_fakes import chunk
from headway.shared.errors import InvalidRequest
from headway.shared.job import Outcome, Status
from headway.worker import output as module
from headway.worker.engines.base import Chunk, Final
from headway.worker.output import Output
from helpers import make_job


@pytest.fixture
def output() -> Output:
    return Output(make_job(body=b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}'))


def _usage(tokens: int) -> Chunk:
    return Chunk(b"", {"choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": tokens}})


def _outcome(output: Output, final: Final) -> Outcome:
    outcome = output.outcome(final)
    assert outcome is not None
    return outcome


def test_a_plain_request_runs_as_a_stream_with_usage(output: Output) -> None:
    assert output.request().body["stream"] is True
    assert output.request().body["stream_options"] == {"include_usage": True}


def test_a_stream_is_assembled(output: Output) -> None:
    # Given chunks and their usage
    for item in (chunk("Hel"), chunk("lo"), chunk("", "stop"), _usage(2)):
        output.add(item)

    # If the engine ends well, I expect the plain answer, its tokens and the age of the first
    outcome = _outcome(output, Final(200, None))
    assert (outcome.status, outcome.status_code) == (Status.COMPLETED, 200)
    assert json.loads(outcome.body)["choices"][0]["message"]["content"] == "Hello"
    assert output.tokens == 2
    assert output.first_token_age_s() is not None


def test_a_plain_answer_is_kept_as_it_is(output: Output) -> None:
    body = b'{"choices": [{"finish_reason": "stop"}],  "usage": {"completion_tokens": 7}}'
    assert _outcome(output, Final(200, body)).body == body
    assert output.tokens == 7
    assert output.first_token_age_s() is None


def test_the_callers_errors_are_final(output: Output) -> None:
    outcome = _outcome(output, Final(422, b'{"error": {}}'))
    assert (outcome.status, outcome.status_code, outcome.body) == (Status.FAILED, 422, b'{"error": {}}')


@pytest.mark.parametrize(
    "final", [Final(500, b"{}"), Final(503, None), Final(200, b'{"choices": [{"finish_reason": "abort"}]}')]
)
def test_the_engines_errors_are_tried_again(output: Output, final: Final) -> None:
    assert output.outcome(final) is None


def test_a_job_is_given_up_without_telling_of_the_engines_insides(output: Output) -> None:
    outcome = output.given_up()
    assert (outcome.status, outcome.status_code) == (Status.FAILED, 500)
    assert json.loads(outcome.body)["error"]["code"] == "engine_failed"


def test_an_unknown_number_of_tokens_is_none(output: Output) -> None:
    output.add(Chunk(b"", {"choices": [], "usage": {"completion_tokens": None}}))
    assert output.tokens == 0


def test_an_abort_inside_a_stream_is_no_answer(output: Output) -> None:
    output.add(chunk("Hel"))
    output.add(chunk("", "abort"))
    assert output.outcome(Final(200, None)) is None


def test_a_cancelled_job_keeps_its_text(output: Output) -> None:
    output.add(chunk("Hel"))
    outcome = output.cancelled()
    body = json.loads(outcome.body)
    assert (outcome.status, outcome.status_code, body["error"]["code"]) == (Status.CANCELLED, 499, "cancelled")
    assert body["partial"]["choices"][0]["message"]["content"] == "Hel"


def test_a_job_cancelled_before_its_first_token_has_no_text(output: Output) -> None:
    assert json.loads(output.cancelled().body)["partial"] is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_json_object_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Output(make_job(body=body)).request()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock of outputs; it says what the test puts into `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_chunk_without_choices_is_no_token(clock: SimpleNamespace) -> None:
    # Given a stream that begins with a chunk without a choice, as some servers' does
    output = Output(make_job())
    assert not output.add(Chunk(b"", {"choices": []}))
    assert output.first_token_age_s() is None

    # If text comes later, I expect the first of it as the first token, and no other
    clock.now = 103.0
    assert output.add(chunk("a"))
    clock.now = 105.0
    assert not output.add(chunk("b"))
    assert output.first_token_age_s() == 2.0
    assert output.age_s() == 5.0


@pytest.mark.parametrize(("choices", "mean_s"), [(1, 0.4), (2, 1.0)])
def test_the_time_between_tokens_is_that_of_one_choice(clock: SimpleNamespace, choices: int, mean_s: float) -> None:
    # Given six tokens within two seconds, and after them the usage
    output = Output(make_job(choices=choices))
    for now in (101.0, 102.0, 103.0):
        clock.now = now
        output.add(chunk("ab"))
    clock.now = 110.0
    output.add(_usage(6))

    # I expect five gaps of one choice, or two of each of two choices
    assert output.inter_token_s() == pytest.approx(mean_s)


@pytest.mark.parametrize(("pieces", "tokens"), [(0, 5), (1, 5), (2, 1)])
def test_without_a_gap_there_is_no_time_between_tokens(clock: SimpleNamespace, pieces: int, tokens: int) -> None:
    # Given an answer that came whole, in one chunk, or with one token
    output = Output(make_job())
    for _ in range(pieces):
        clock.now += 1
        output.add(chunk("a"))
    clock.now += 1
    output.add(_usage(tokens))

    assert output.inter_token_s() is None
