"""How a command finds the stack that `headway up` runs in this folder: by a file of settings that it leaves there."""

import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings

FILE = "up.json"


def local_settings() -> Settings:
    """The settings of the environment; without HEADWAY_REDIS_URL, those of a running `headway up` stand behind them.

    Raises:
        pydantic.ValidationError, ConfigurationError: as `Settings`.
    """
    settings = Settings()
    beside = settings.data_dir / FILE
    if "redis_url" in settings.model_fields_set:
        return settings
    try:
        left = json.loads(beside.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return settings
    except OSError as error:
        raise ConfigurationError(f"HEADWAY_DATA_DIR: {beside} cannot be read ({error.strerror})") from error
    return Settings(**{**left, **given(settings)})


def given(settings: Settings) -> dict[str, Any]:
    """The settings that somebody has set, as JSON has them, with the secrets in plain text."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    secrets = {name: value.get_secret_value() for name, value in values.items() if isinstance(value, SecretStr)}
    return settings.model_dump(mode="json", include=settings.model_fields_set) | secrets


def environment(settings: Settings) -> dict[str, str]:
    """The settings that somebody has set, as environment variables that make the same settings again."""
    return {f"HEADWAY_{name.upper()}": _text(value) for name, value in given(settings).items()}


def leave(settings: Settings) -> Path:
    """Writes the file that `local_settings` reads, for its owner only since it may hold a password; returns it."""
    new = settings.data_dir / f"{FILE}.new"
    new.unlink(missing_ok=True)
    new.touch(0o600, exist_ok=False)
    new.write_text(json.dumps(given(settings)))
    return new.replace(settings.data_dir / FILE)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return "" if value is None else str(value)
