"""The dashboard and the alerts are whole, and ask only for what exists; tests/e2e/test_monitoring.py asks it."""

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from monitoring import DASHBOARD, ROOT, expressions, panels

BOARD = json.loads(DASHBOARD.read_text())
ALERTS = yaml.safe_load((ROOT / "k8s/monitoring/alerts.yaml").read_text())
RULES = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: Grafana's columns.
WIDTH = 24


def ours(expression: str) -> set[str]:
    """Our metrics in an expression, histograms by their own name."""
    return {re.sub("_(bucket|count|sum)$", "", name) for name in re.findall(r"\bheadway_\w+", expression)}


def documented() -> set[str]:
    """Our metrics; another test compares this list with the code."""
    return set(re.findall(r"`(headway_[a-z_]+)`", (ROOT / "docs/operations.md").read_text()))


def apart(one: dict[str, int], other: dict[str, int]) -> bool:
    def before(a: dict[str, int], b: dict[str, int]) -> bool:
        return a["x"] + a["w"] <= b["x"] or a["y"] + a["h"] <= b["y"]

    return before(one, other) or before(other, one)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_is_whole(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("stat", "timeseries")
    assert panel["datasource"] == SOURCE
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert references
    assert len(set(references)) == len(references)
    assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_panels_stand_side_by_side() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    assert all(apart(one, other) for one, other in combinations(places, 2))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)


def test_variables_are_those_that_are_used() -> None:
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD["panels"])))
    assert names == used == {"datasource", "model", "lane"}
    assert all(v["datasource"] == SOURCE for v in BOARD["templating"]["list"] if v["type"] == "query")


def test_all_that_is_measured_is_shown() -> None:
    # I expect the dashboard to know each of our metrics, and no other
    asked: set[str] = set().union(*(ours(expression) for expression in expressions()))
    assert asked == documented()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_exists(rule: dict[str, Any]) -> None:
    assert ours(rule["expr"])
    assert ours(rule["expr"]) <= documented()
