"""How a command finds the stack that `headway up` runs in this folder: by a file of settings that it leaves there."""

from pathlib import Path

from headway.shared.settings import Settings

FILE = "up.env"


def local_settings() -> Settings:
    """The settings of the environment; without HEADWAY_REDIS_URL, those of a running `headway up` stand behind them.

    Raises:
        pydantic.ValidationError, ConfigurationError: as `Settings`.
    """
    settings = Settings()
    beside = settings.data_dir / FILE
    if "redis_url" in settings.model_fields_set or not beside.exists():
        return settings
    return Settings(_env_file=beside)  # pyright: ignore[reportCallIssue] (pydantic-settings adds it)


def environment(settings: Settings) -> dict[str, str]:
    """The settings that are not defaults, as environment variables that make the same settings again."""
    values = settings.model_dump(mode="json", include=settings.model_fields_set)
    return {f"HEADWAY_{name.upper()}": _text(value) for name, value in values.items()}


def leave(settings: Settings) -> Path:
    """Writes the file that `local_settings` reads; returns it."""
    path = settings.data_dir / FILE
    path.write_text("".join(f"{name}='{value}'\n" for name, value in environment(settings).items()))
    return path


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return "" if value is None else str(value)
