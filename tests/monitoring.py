"""What reads our metrics: a page taken apart, a real Prometheus with its promtool, and the dashboard's questions."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from helpers import PATIENCE_S
from programs import ROOT
from valkey_server import free_port

DASHBOARD = ROOT / "k8s/monitoring/dashboard.json"

#: What stands in our expressions for Grafana's variables. The window is long, since a sample that a busy machine has
#: delayed must still be in it; a rate needs two of them, wherever they are.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$lane": ".*"}


def program(name: str) -> str:
    """The path of a program that a test needs; without it the test fails in CI and is skipped elsewhere."""
    if (path := shutil.which(name)) is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"{name} is not on PATH; Debian's package `prometheus` has it")
    return path


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the rows that only head them."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """All that the dashboard asks Prometheus, as Grafana would send it."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    for name, value in VARIABLES.items():
        found = [expression.replace(name, value) for expression in found]
    return found


class Page:
    """The samples of one scrape; `page["name", {"label": "value"}]`, 0 for one that is not there."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.text = text
        self.families = {family.name: family.type for family in families}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __getitem__(self, key: tuple[str, Mapping[str, str]]) -> float:
        name, labels = key
        return self._values.get((name, frozenset(labels.items())), 0.0)

    def sums(self, name: str, label: str) -> dict[str, float]:
        """The samples of this name added up by one label, without those that are 0."""
        found: dict[str, float] = {}
        for (each, labels), value in self._values.items():
            if each == name and value:
                key = dict(labels)[label]
                found[key] = found.get(key, 0.0) + value
        return found


def complaints(page: str, about: str = "headway_") -> list[str]:
    """What promtool finds wrong with metrics whose names begin so."""
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    # It says 3 when it has found something, and 1 when it cannot read the page at all.
    assert done.returncode in (0, 3), done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(about)]


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def close(self) -> None:
        self._http.close()

    def answers(self) -> bool:
        try:
            return self._http.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, each with the labels `metric` and the sample `value`.

        Raises:
            ValueError: Prometheus does not understand the expression.
        """
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def lacking(self, asked: Iterable[str]) -> list[str]:
        """Those of the expressions that have no series now, or one without a number."""
        return [expression for expression in asked if not self._has_data(expression)]

    def _has_data(self, expression: str) -> bool:
        series = self.query(expression)
        return bool(series) and all(each["value"][1] != "NaN" for each in series)


@contextmanager
def prometheus(folder: Path, pages: Mapping[str, str]) -> Iterator[Prometheus]:
    """A server that reads every second.

    Args:
        folder: for its data.
        pages: host and port by the name of the job.
    """
    jobs = [{"job_name": name, "static_configs": [{"targets": [page]}]} for name, page in pages.items()]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": config, "storage.tsdb.path": folder / "data", "web.listen-address": address}
    command = [program("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    log = folder / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        server = Prometheus(f"http://{address}")
        try:
            _wait_until_it_answers(server, process, log)
            yield server
        finally:
            server.close()
            process.kill()


def _wait_until_it_answers(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(10 * PATIENCE_S):
        if server.answers():
            return
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise TimeoutError(log.read_text(errors="replace"))
