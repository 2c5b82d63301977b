"""Real vLLM. An engine belongs to a module and is closed before the next module starts its own."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

#: A start takes some twenty seconds on two idle cores, and several times that on busy ones.
TIMEOUT_S = 600

# Read by vLLM and by the processes that it spawns.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# It would set whole GiB of KV cache, where these tests ask for less.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

#: What vLLM and its libraries warn of in this process. Our own modules' warnings stay errors.
LIBRARY_WARNINGS = ("ignore::DeprecationWarning:torch", "ignore::DeprecationWarning:vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            for warning in LIBRARY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


def pytest_configure(config: pytest.Config) -> None:
    """vLLM leaves its ZeroMQ context to the garbage collector, which finds it in any later test, or at the end."""
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context:ResourceWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """pytest's own last look for such warnings began before this file was read."""
    warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)


@pytest.fixture(scope="session", autouse=True)
def vllm_installed() -> None:
    """Real-engine tests may be missing on a laptop, but never unnoticed in CI."""
    if find_spec("vllm") is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("vLLM is not installed; `make install` does it")


@pytest.fixture(scope="session")
def small_model(pytestconfig: pytest.Config) -> Path:
    """The small real model, where `headway model fetch` puts it."""
    from headway.worker.model import DEFAULT_TARGET, fetch

    return fetch(pytestconfig.rootpath / DEFAULT_TARGET)
