"""How jobs are run, which chunks are shown, and how plain answers are put together again: pure."""

import pytest

from headway.shared.tokens import CHAT, COMPLETIONS
from headway.worker.assemble import Assembler, as_stream

MESSAGES = [{"role": "user", "content": "Hi"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chunk(*choices, **head):
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", **head} | {
        "choices": list(choices)
    }


def delta(index=0, finish_reason=None, **fields):
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish_reason}


def assembled(endpoint, *chunks):
    assembler = Assembler(endpoint)
    for each in chunks:
        assembler.add(each)
    return assembler.answer()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "stream": False, "temperature": 0, "max_tokens": 5, "user": "me"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
        (CHAT, {"messages": MESSAGES, "n": 1, "stop": [], "presence_penalty": 0, "frequency_penalty": 0.0}),
        (CHAT, {"messages": MESSAGES, "logprobs": False, "tools": None, "seed": None, "tool_choice": "none"}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "text"}}),
        (COMPLETIONS, {"prompt": "Hi", "best_of": 1, "echo": False, "logprobs": None}),
    ],
)
def test_what_can_be_continued_runs_as_a_stream(endpoint, body):
    # Given a body of which another worker could continue the text, if I ask how it is run,
    # I expect a stream with usage, and nothing else changed
    assert as_stream(endpoint, body) == {**body, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"n": True},
        {"best_of": 2},
        {"echo": True},
        {"logprobs": 0},
        {"logprobs": True},
        {"seed": 0},
        {"stop": "\n"},
        {"stop": ["a"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {}},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
        {"a_field_of_next_year": 1},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("endpoint", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})])
def test_what_cannot_be_continued_runs_as_it_was_asked(endpoint, prompt, change):
    # Given a body with a feature that ends with its engine, if I ask how it is run, I expect: as it was asked
    assert as_stream(endpoint, {**prompt, **change}) is None


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": ["Hi", "Ho"]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {}),
        (CHAT, {"messages": "Hi"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}),
        (CHAT, {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_what_is_not_one_text_prompt_runs_as_it_was_asked(endpoint, body):
    assert as_stream(endpoint, body) is None


def test_a_wanted_stream_stays_one_whatever_its_features():
    # Given a body that asks for a stream of two choices, with an option of its own
    body = {"messages": MESSAGES, "n": 2, "stream": True, "stream_options": {"continuous_usage_stats": True}}

    # If I ask how it is run, I expect that stream with its option and with usage
    options = {"continuous_usage_stats": True, "include_usage": True}
    assert as_stream(CHAT, body) == {**body, "stream_options": options}


def test_wrong_stream_options_are_left_to_the_engine_to_refuse():
    assert as_stream(CHAT, {"messages": MESSAGES, "stream": True, "stream_options": "usage"}) is None


def test_a_chat_is_put_together_with_the_engines_nulls():
    # If I add a role, two pieces of text, an end and the usage
    answer = assembled(
        CHAT,
        chunk(delta(role="assistant", content="")),
        chunk(delta(content="Hel")),
        chunk(delta(content="lo", finish_reason="stop") | {"stop_reason": 7}),
        chunk(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 0}}, system_fingerprint="f"),
    )

    # I expect the plain answer
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == 7
    assert answer["choices"][0]["logprobs"] is None
    assert (answer["id"], answer["object"], answer["created"]) == ("chatcmpl-1", "chat.completion", 7)
    assert answer["system_fingerprint"] == "f"
    assert answer["usage"] == {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


def test_choices_that_arrive_mixed_are_told_apart():
    # If pieces of two choices arrive by turns, the second first
    answer = assembled(
        CHAT,
        chunk(delta(1, content="B")),
        chunk(delta(0, content="a")),
        chunk(delta(1, content="C", finish_reason="length")),
        chunk(delta(0, content="b", finish_reason="stop")),
    )

    # I expect each with its own text and end, in the order of their indexes
    told = [(each["index"], each["message"]["content"], each["finish_reason"]) for each in answer["choices"]]
    assert told == [(0, "ab", "stop"), (1, "BC", "length")]


def test_tool_calls_are_merged_by_their_index():
    # If two tool calls arrive in pieces
    def call(index, **fields):
        return chunk(delta(tool_calls=[{"index": index, **fields}]))

    answer = assembled(
        CHAT,
        call(0, id="a", type="function", function={"name": "get", "arguments": ""}),
        call(0, function={"arguments": '{"x":'}),
        call(1, id="b", type="function", function={"name": "put", "arguments": "{}"}),
        call(0, function={"arguments": "1}"}),
        chunk(delta(finish_reason="tool_calls")),
    )

    # I expect two whole calls, and no content beside them
    assert answer["choices"][0]["message"]["content"] is None
    assert answer["choices"][0]["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "put", "arguments": "{}"}},
    ]


def test_reasoning_and_refusal_have_their_own_texts():
    answer = assembled(CHAT, chunk(delta(reasoning="hm")), chunk(delta(reasoning="m")), chunk(delta(refusal="no")))
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["refusal"], message["content"]) == ("hmm", "no", None)


def test_an_empty_answer_is_an_empty_text():
    answer = assembled(CHAT, chunk(delta(role="assistant", content="")), chunk(delta(content="", finish_reason="stop")))
    assert answer["choices"][0]["message"]["content"] == ""


def test_logprobs_and_token_ids_are_joined():
    # If a chat's and a completion's logprobs and token ids arrive in pieces
    chat = assembled(
        CHAT,
        chunk(delta(content="a") | {"logprobs": {"content": [1]}, "token_ids": [5]}),
        chunk(delta(content="b") | {"logprobs": {"content": [2]}, "token_ids": [6]}),
        chunk(delta(content="", finish_reason="stop")),
    )["choices"][0]
    completion = assembled(
        COMPLETIONS,
        chunk({"index": 0, "text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1]}}),
        chunk({"index": 0, "text": "b", "logprobs": {"tokens": ["b"], "token_logprobs": [-2]}}),
    )["choices"][0]

    # I expect them whole
    assert (chat["logprobs"], chat["token_ids"]) == ({"content": [1, 2]}, [5, 6])
    assert completion["text"] == "ab"
    assert completion["logprobs"] == {"tokens": ["a", "b"], "token_logprobs": [-1, -2]}


def test_what_it_is_given_stays_as_it_is():
    # Given a chunk with token ids, if more are added, I expect the chunk unchanged: readers get it too
    first = chunk(delta(content="a") | {"token_ids": [5]})
    assembled(CHAT, first, chunk(delta(content="b") | {"token_ids": [6]}))
    assert first["choices"][0]["token_ids"] == [5]


def test_the_answer_so_far_is_the_partial_text():
    # Given a completion that was left in the middle
    assembler = Assembler(COMPLETIONS)
    assert assembler.answer() is None
    assembler.add(chunk({"index": 0, "text": "Once", "finish_reason": None}, object="text_completion"))

    # If I ask for the answer, I expect the text so far, and neither an end nor usage
    answer = assembler.answer()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "Once"
    assert answer["choices"][0]["finish_reason"] is None
    assert answer["usage"] is None
    assert assembler.usage is None
