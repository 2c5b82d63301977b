"""The embedded profile, the data folder's lock and the socket's path."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headway.producer import embedded
from headway.producer.embedded import AlreadyRunning, data_folder, embedded_settings, socket_path
from headway.producer.measure import Round, prompts, summary
from headway.producer.stack import Stack
from headway.producer.up import without_password
from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings


def profile(**given: Any) -> dict[str, Any]:
    """What the profile makes of settings, but for the defaults."""
    return embedded_settings(Settings(**given)).model_dump(exclude_defaults=True)


def test_the_profile_suits_the_small_model() -> None:
    # If nothing is set, I expect the small model, bounds below its length, and a KV cache of its own size
    settings = embedded_settings(Settings())
    assert (settings.short_below, settings.mid_to) == (256, 1024)
    assert settings.model == str(Path.cwd() / ".cache/models/smollm2-135m-instruct")
    assert settings.served_model == "smollm2-135m-instruct"
    assert "--kv-cache-memory-bytes" in settings.engine_args


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given settings of one's own, in the environment and beside it
    monkeypatch.setenv("HEADWAY_SHORT_BELOW", "100")
    # If the profile is put behind them, I expect them to win, and no flag for a model that is not the small one
    assert profile(model="mine", mid_to=500) == {
        "model": "mine",
        "short_below": 100,
        "mid_to": 500,
        "api_grace_s": 1,
    }
    assert profile(engine_args="--x")["engine_args"] == "--x"
    assert profile(served_model="s")["served_model"] == "s"


def test_the_simulated_engine_needs_no_model() -> None:
    # If the engine is the simulated one, I expect its name, and no model
    assert profile(engine="simulated") == {
        "engine": "simulated",
        "served_model": "simulated",
        "short_below": 256,
        "mid_to": 1024,
        "api_grace_s": 1,
    }


def test_an_upstream_needs_no_model_either() -> None:
    # If the engine runs elsewhere, I expect neither the small model nor flags of a vLLM
    given = {"engine": "upstream", "upstream_url": "http://host", "upstream_model": "m"}
    assert profile(**given) == given | {"short_below": 256, "mid_to": 1024, "api_grace_s": 1}


@pytest.mark.parametrize(("flags", "float32"), [("fma avx2", True), ("avx2 avx512_bf16 fma", False), (None, True)])
def test_a_processor_without_bfloat16_computes_in_float32(
    flags: str | None, float32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given vLLM for the CPU, and what a processor says of itself
    monkeypatch.setattr(embedded, "distributions", lambda name: [name])
    cpu = tmp_path / "cpuinfo"
    if flags is not None:
        cpu.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    # If the flags are chosen, I expect float32 where bfloat16 would be emulated
    assert ("--dtype float32" in embedded.engine_args(cpu)) == float32
    assert "--enforce-eager" in embedded.engine_args(cpu)
    # but never on a GPU
    monkeypatch.setattr(embedded, "distributions", lambda name: [])
    assert "float32" not in embedded.engine_args(cpu)
    assert "eager" not in embedded.engine_args(cpu)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    # Given a data folder in use
    folder = tmp_path / "new"
    owner = f"process {os.getpid()}.*HEADWAY_DATA_DIR"
    # If somebody else wants it, I expect a refusal that names the owner and the setting
    with data_folder(folder), pytest.raises(AlreadyRunning, match=owner), data_folder(folder):
        pass
    # and no refusal later
    with data_folder(folder):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    # Given a file where the data folder should be, and one where its parent should be
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        # If I start there, I expect the setting to be named
        with pytest.raises(ConfigurationError, match=f"HEADWAY_DATA_DIR={folder} cannot be used"), data_folder(folder):
            pass


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]"),
        ("::", "[::1]"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_a_server_is_reached_where_it_listens(host: str, address: str) -> None:
    # If the servers listen on a host, I expect URLs that reach them, from everywhere on the machine for a wildcard
    stack = Stack(Settings(engine="simulated", api_host=host, api_port=1, health_host=host, health_port=2))
    assert (stack.api_url, stack.health_url) == (f"http://{address}:1", f"http://{address}:2/health")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:p@ss@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://:pw@host?password=pw", "rediss://***@host"),
        ("redis://host/0", "redis://host/0"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_socket_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a short folder, a long one, and a temporary folder that is long too
    short, long = Path("/run/x"), Path("/run", "x" * 120)
    with socket_path(short) as path:
        assert path.parent == short
    # If a path would be too long, I expect a temporary one, which goes afterwards
    with socket_path(long) as path:
        assert len(str(path)) <= 100
        assert path.parent.is_dir()
    assert not path.parent.exists()
    # or a clear error
    deep = tmp_path / ("y" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="HEADWAY_DATA_DIR"), socket_path(long):
        pass


def test_the_mix_shares_no_prefix() -> None:
    # Given the prompts of two rounds
    texts = [*prompts("a"), *prompts("b")]
    # If I compare them, I expect 32 texts that begin differently, of the lengths that were promised, the same each time
    assert len({text.split()[0] for text in texts}) == 32
    assert [len(text.split()) for text in prompts("a")] == [20] * 8 + [150] * 5 + [600] * 3
    assert prompts("a") == texts[:16]


def test_the_figures() -> None:
    # If 2 jobs of 50 tokens take 1 s at once and 4 s in turn, I expect a ratio of 4
    jobs = [{"output_tokens": 50}, {"output_tokens": 50}]
    figures = summary(Round(jobs, 1.0), Round(jobs, 4.0))
    assert (figures["together_tokens_per_s"], figures["one_by_one_tokens_per_s"], figures["ratio"]) == (100, 25, 4)
