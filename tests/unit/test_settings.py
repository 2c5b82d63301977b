"""Settings come from the environment, and wrong ones are refused by name."""

import pytest
from pydantic import TypeAdapter, ValidationError

from headway.producer.local import environment
from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings, explain


def test_defaults_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HEADWAY_{name.upper()}", raising=False)
    settings = Settings()
    assert [lane.name for lane in settings.lanes] == ["short", "mid", "long"]
    assert settings.batch_max_wait_ms == 0


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an environment
    monkeypatch.setenv("HEADWAY_SHORT_BELOW", "256")
    monkeypatch.setenv("HEADWAY_MID_TO", "1024")
    monkeypatch.setenv("HEADWAY_LANE_SHARES", "0.6,0.2,0.2")
    monkeypatch.setenv("HEADWAY_MAX_MODEL_LEN", "")

    # I expect its values, and an empty one to count as unset
    settings = Settings()
    assert [lane.max_prompt_tokens for lane in settings.lanes] == [255, 1024, None]
    assert [lane.share for lane in settings.lanes] == [0.6, 0.2, 0.2]
    assert settings.max_model_len is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADWAY_API_PORT", "70000"),
        ("HEADWAY_BATCH_MAX_WAIT_MS", "-1"),
        ("HEADWAY_DRAIN_S", "inf"),
        ("HEADWAY_ENGINE", "magic"),
        ("HEADWAY_ENGINE_ARGS", "--unclosed 'quote"),
        ("HEADWAY_LANE_SHARES", "1,2"),
        ("HEADWAY_LANE_SHARES", "nan,nan,nan"),
        ("HEADWAY_PREFIX", "white space"),
        ("HEADWAY_UPSTREAM_KV_TOKENS", "0"),
        ("HEADWAY_UPSTREAM_SLOTS", "0"),
    ],
)
def test_wrong_values_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as caught:
        Settings()
    # I expect one line that begins with the variable
    assert explain(caught.value).startswith(f"{name}=")
    assert "\n" not in explain(caught.value)


def test_what_vllm_refuses_is_no_setting_of_ours() -> None:
    # Given a value that another model than the settings refuses, as vLLM does
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_python({"max_num_seqs": "many"})
    # If it is explained, I expect the reason without a variable's name
    assert explain(caught.value).startswith("Input should be a valid integer")


def test_contradictions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SHORT_BELOW", "2000")
    monkeypatch.setenv("HEADWAY_MID_TO", "1000")
    with pytest.raises(ConfigurationError, match="HEADWAY_SHORT_BELOW=2000, HEADWAY_MID_TO=1000"):
        Settings()


@pytest.mark.parametrize(("served", "model", "name"), [("s", "m", "s"), ("", "org/m", "org/m"), ("", "", "simulated")])
def test_the_name_that_callers_use(served: str, model: str, name: str) -> None:
    assert Settings(served_model=served, model=model, engine="simulated").model_name == name


def test_an_upstreams_name_of_the_model_is_the_callers_unless_they_have_their_own() -> None:
    assert Settings(engine="upstream", upstream_model="org/m").model_name == "org/m"
    assert Settings(engine="upstream", upstream_model="org/m", served_model="s").model_name == "s"


def test_children_get_the_key_and_nobody_else_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a key in the environment
    monkeypatch.setenv("HEADWAY_UPSTREAM_API_KEY", "sk-secret")
    settings = Settings()

    # If the settings are handed to a child process, I expect it to have the key
    assert environment(settings) == {"HEADWAY_UPSTREAM_API_KEY": "sk-secret"}
    # and if they are shown, I expect no key
    assert "sk-secret" not in f"{settings!r} {settings} {settings.model_dump_json()}"
