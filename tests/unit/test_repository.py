"""The repository checks itself: layout, import walls, and that what exists is documented."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from prometheus_client import CollectorRegistry

from headway.api.metrics import ApiMetrics
from headway.shared.keys import Keys
from headway.shared.settings import Settings
from headway.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
UNITS = ("api", "producer", "shared", "worker")
SCRIPTS = sorted((ROOT / "shared/headway/shared/lua").glob("*.lua"))

#: The modules of `headway.shared` that speak to Redis; nothing else in the four units imports its client.
SPEAK_TO_REDIS = {"autopipeline", "connect", "lane_reader", "notices"}

WALLS = [
    *[(unit, "vllm") for unit in ("api", "producer", "shared")],
    *[(unit, "fastapi") for unit in ("producer", "shared", "worker")],
    *[(unit, "redis") for unit in UNITS],
    *[(unit, "rq") for unit in UNITS],
    *[(unit, f"headway.{other}") for unit in UNITS for other in ("api", "producer", "worker") if unit != other],
]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]
    return table


def sources(unit: str) -> list[Path]:
    return sorted((ROOT / unit / "headway" / unit).rglob("*.py"))


def metrics() -> list[str]:
    """The names of all our metrics, as Prometheus shows them."""
    worker = CollectorRegistry()
    WorkerMetrics(worker)
    families = [*ApiMetrics().registry.collect(), *worker.collect()]
    suffix = {"counter": "_total", "info": "_info"}
    return sorted({f.name + suffix.get(f.type, "") for f in families if f.name.startswith("headway_")})


def ruff_on(code: str, path: str) -> str:
    """What the import walls say of this code, if it stood at this path."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "--stdin-filename", path, "-"]
    return subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True).stdout


def top_level_imports(path: Path) -> set[str]:
    """The distributions, roughly, that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("unit", UNITS)
def test_headway_is_a_namespace_of_typed_packages(unit: str) -> None:
    # An __init__.py beside the sub-packages would make `headway` belong to one unit and hide the three others.
    assert not (ROOT / unit / "headway" / "__init__.py").exists()
    assert (ROOT / unit / "headway" / unit / "py.typed").exists()


@pytest.mark.parametrize(("unit", "banned"), WALLS)
def test_an_import_wall_stands(unit: str, banned: str) -> None:
    # Given a new module in this unit
    path = f"{unit}/headway/{unit}/new.py"

    # If it imports what is banned there, at its top or inside a function, I expect ruff to name the wall
    assert f"`{banned}` is banned" in ruff_on(f"import {banned}\n", path)
    assert f"`{banned}` is banned" in ruff_on(f"def lazy():\n    from {banned} import thing\n", path)


@pytest.mark.parametrize(("unit", "allowed"), [("api", "fastapi"), ("worker", "vllm"), *[(u, "json") for u in UNITS]])
def test_an_import_wall_has_its_door(unit: str, allowed: str) -> None:
    assert "banned" not in ruff_on(f"import {allowed}\n", f"{unit}/headway/{unit}/new.py")


def test_few_modules_speak_to_redis_and_import_no_other_walled_thing() -> None:
    # Ruff lifts a wall for a whole file only, so what these few import is looked at here.
    speakers = {path.stem: top_level_imports(path) for path in sources("shared") if "redis" in top_level_imports(path)}

    assert speakers.keys() == SPEAK_TO_REDIS
    assert not set().union(*speakers.values()) & {"fastapi", "rq", "vllm"}


@pytest.mark.parametrize("unit", UNITS)
def test_no_wall_is_climbed_by_a_comment(unit: str) -> None:
    assert [path for path in sources(unit) if "TID251" in path.read_text()] == []


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_is_documented(name: str) -> None:
    assert f"`HEADWAY_{name.upper()}`" in read("docs/operations.md")


@pytest.mark.parametrize("name", project()["entry-points"]["headway.commands"])
def test_a_command_is_documented(name: str) -> None:
    assert re.search(rf"\bheadway {name}\b", read("README.md") + read("docs/operations.md"))


@pytest.mark.parametrize("name", [name for name, _ in getmembers(Keys, isfunction) if not name.startswith("_")])
def test_a_key_is_documented(name: str) -> None:
    assert f"`{name}`" in read("docs/design.md")


@pytest.mark.parametrize("name", metrics())
def test_a_metric_is_documented(name: str) -> None:
    assert f"`{name}`" in read("docs/operations.md")


def test_a_documented_metric_exists() -> None:
    named = set(re.findall(r"`(headway_[a-z_]+)`", read("docs/operations.md")))
    assert named == set(metrics())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_goes_in_and_out(path: Path) -> None:
    header = re.match(r"(--.*\n)+", path.read_text())

    assert header is not None
    assert all(word in header[0] for word in ("KEYS:", "ARGV:", "Returns:"))


def test_the_changelog_names_this_version() -> None:
    assert re.search(rf"^## \[{re.escape(project()['version'])}\] - \d{{4}}-\d\d-\d\d$", read("CHANGELOG.md"), re.M)


def test_make_help_lists_every_target() -> None:
    # Given the targets that somebody may call: those that are phony, but for the steps of others
    phony = {name for line in re.findall(r"^\.PHONY:(.*)", read("Makefile"), re.M) for name in line.split()}
    targets = {name for name in phony if "-" not in name}

    # I expect `make` alone to list each with a line of its own
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  make (\w+) +\S", shown, re.M)
    assert {"help", "install", "demo", "up", "test", "check", "bench"} <= targets
    assert sorted(listed) == sorted(targets)


def test_the_lock_has_every_dependency() -> None:
    lock = read("requirements/cpu.lock")
    wanted = [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]
    names = [re.match(r"[\w-]+", requirement) for requirement in wanted]

    assert [name[0] for name in names if name and f"\n{name[0]}==" not in lock] == []
    assert re.search(r"\ntorch==[\d.]+\+cpu ", lock), "any other torch is a CUDA build"


@pytest.mark.parametrize("lock", sorted(path.name for path in (ROOT / "requirements").glob("*.lock")))
def test_a_lock_names_no_machine(lock: str) -> None:
    # Beside the file from which an image's lock has its versions.
    text = read(f"requirements/{lock}").replace("-c requirements/cpu.lock", "")

    assert not re.search(r"://|--|/\w+/", text), "no index, no option, no path"
    assert all(re.match(r"#|[\w.-]+==[\w.+]+ +# via ", line) for line in text.splitlines())


def test_the_wheel_carries_all_four_units(tmp_path: Path) -> None:
    # If I build the wheel
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])

    # I expect every source file, script and type marker in it, and no folder that would shadow the namespace
    names = set(zipfile.ZipFile(built).namelist())
    for unit in UNITS:
        files = [path for path in (ROOT / unit / "headway").rglob("*") if path.suffix in {".py", ".lua", ".typed"}]
        assert {path.relative_to(ROOT / unit).as_posix() for path in files} <= names
    assert "headway/__init__.py" not in names
