"""The Python client and the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.producer.blocking import Client, JobHandle
    from headway.producer.client import AsyncClient, AsyncJobHandle

__all__ = ["AsyncClient", "AsyncJobHandle", "Client", "JobHandle"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for, so that `headway --help` need not import Redis and pydantic.
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client" if name.startswith("Async") else "blocking"
    return getattr(import_module(f"{__name__}.{module}"), name)
