"""The pure parts of the overhead benchmark: who goes first, and what becomes of the figures."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from programs import ROOT


@pytest.fixture(scope="module")
def overhead() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("overhead")


@pytest.fixture
def load(overhead: ModuleType) -> ModuleType:
    return importlib.import_module("load")


def a_round(overhead: ModuleType, streamed: float, plain: float, direct_ms: list[int], headway_ms: list[int]) -> Any:
    """A round in which the direct side makes 100 tokens a second, and the stages of a request are equally long."""
    return overhead.Round(
        rates={"stream": {"direct": 100.0, "headway": streamed}, "plain": {"direct": 100.0, "headway": plain}},
        first_token_s={"direct": [ms / 1000 for ms in direct_ms], "headway": [ms / 1000 for ms in headway_ms]},
        stages_s={
            "direct": [dict.fromkeys(overhead.DIRECT_STAGES, ms / 3000) for ms in direct_ms],
            "headway": [dict.fromkeys(overhead.STAGES, ms / 5000) for ms in headway_ms],
        },
    )


def test_the_sides_take_turns_in_going_first(overhead: ModuleType) -> None:
    orders = [overhead.order(step) for step in range(4)]

    assert orders == [("direct", "headway"), ("headway", "direct")] * 2


def test_figures_are_medians_over_rounds_with_their_ranges(overhead: ModuleType) -> None:
    # Given three rounds, of which one is far off
    rounds = [
        a_round(overhead, 98.0, 99.0, [100, 110, 900], [105, 115, 125]),
        a_round(overhead, 50.0, 40.0, [100, 110, 120], [190, 200, 210]),
        a_round(overhead, 96.0, 97.0, [100, 110, 120], [100, 117, 130]),
    ]

    # If I sum them up
    line = overhead.summary(rounds)

    # I expect ratios to be taken inside each round, and differences inside each turn, before their median
    assert (line["throughput_ratio"], line["throughput_ratio_range"]) == (0.96, [0.5, 0.98])
    assert (line["throughput_ratio_plain"], line["throughput_ratio_plain_range"]) == (0.97, [0.4, 0.99])
    assert (line["later_by_turn_ms_p50"], line["later_by_turn_ms_p50_range"]) == (7.0, [5.0, 90.0])
    # …and what is added to be taken outside vLLM: four fifths of 115, 200 and 117 ms, less two thirds of 110 each
    assert (line["added_ttft_ms_p50"], line["added_ttft_ms_p50_range"]) == (20.3, [18.7, 86.7])
    assert line["tokens_per_s"] == {"direct": 100.0, "headway": 96.0}
    assert line["ttft_ms_p50"] == {"direct": 110.0, "headway": 125.0}
    assert line["stages_ms_p50"]["headway"] == dict.fromkeys(overhead.STAGES, 25.0)
    assert line["stages_ms_p50"]["direct"] == dict.fromkeys(overhead.DIRECT_STAGES, 36.7)
    assert line["outside_vllm_ms_p50"] == {"direct": 73.3, "headway": 100.0}
    assert line["rounds"] == 3


@pytest.mark.parametrize(
    ("delta", "text"), [({"role": "assistant", "content": ""}, False), ({"content": "Hi"}, True), ({}, False)]
)
def test_the_role_alone_is_no_text(overhead: ModuleType, delta: dict[str, str], text: bool) -> None:
    assert overhead.has_text({"choices": [{"delta": delta}]}) is text


def test_chunks_of_a_part_of_a_stream(overhead: ModuleType) -> None:
    body = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n: waiting\n\ndata: [DONE]\n\n'

    assert list(overhead.chunks(body)) == [{"a": 1}, {"b": 2}]


def test_prompts_differ_from_the_start_and_are_of_one_length(load: ModuleType) -> None:
    # If I make the prompts of two sides
    texts = [*load.prompts("direct-1", 40), *load.prompts("headway-1", 40)]

    # I expect no two to begin alike, so that no cache helps one of them, and all to be equally long
    assert len({tuple(text.split()[:2]) for text in texts}) == 80
    assert len({len(text.split()) for text in texts}) == 1
