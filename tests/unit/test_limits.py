"""The model's context length, before an engine runs."""

from pathlib import Path
from typing import Any

import pytest

import tiny_model
from headway.shared.limits import config_length, model_length
from headway.shared.settings import Settings


def test_the_setting_wins() -> None:
    assert model_length(Settings(engine="vllm", model="anything", max_model_len=5)) == 5


def test_the_simulated_engine_holds_what_its_memory_holds() -> None:
    assert model_length(Settings(engine="simulated", simulated_kv_tokens=1234)) == 1234


def test_a_models_folder_says_it(tmp_path: Path) -> None:
    assert model_length(Settings(engine="vllm", model=str(tiny_model.make(tmp_path)))) == tiny_model.MAX_MODEL_LEN


def test_a_folder_without_a_config_leaves_it_to_the_engine(tmp_path: Path) -> None:
    assert model_length(Settings(engine="vllm", model=str(tmp_path))) is None
    assert model_length(Settings(engine="vllm")) is None


def test_in_front_of_an_upstream_a_model_is_only_a_name(tmp_path: Path) -> None:
    model = str(tiny_model.make(tmp_path))
    assert model_length(Settings(engine="upstream", model=model)) is None
    assert model_length(Settings(engine="upstream", model=model, max_model_len=5)) == 5


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 100}}, 100),
        ({}, None),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2.0}}, 200),
        ({"max_position_embeddings": 400, "rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, 400),
        (
            {
                "max_position_embeddings": 400,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            400,
        ),
    ],
)
def test_what_a_config_promises(config: dict[str, Any], length: int | None) -> None:
    assert config_length(config) == length
