"""Every query of the dashboard, against the metrics of a server that has done some of everything."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from process_harness import RATE, ServerProcess, eventually, noise, random_codes
from prometheus_client.parser import text_string_to_metric_families

from mimo_tokenizer_client import TokenizerClient

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy/grafana/mimo-tokenizer.json").read_text(encoding="utf-8")
)
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
# What Prometheus itself adds to all that it reads.
OF_PROMETHEUS = {"job", "instance"}


@pytest.fixture(scope="module")
def exposed() -> Iterator[dict[str, set[str]]]:
    """Of a running server: the labels of each sample, by its name."""
    server = ServerProcess("--metrics-address", "127.0.0.1:0")
    try:
        server.ready()
        with TokenizerClient(server.address) as client:
            client.encode(noise(1), RATE)
            client.decode(random_codes(10))
            client.decode_vq(random_codes(10))
        address = server.wait_for(" metrics ").rsplit("address=", 1)[1].strip()
        labels: dict[str, set[str]] = {}

        def complete() -> bool:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
                families = list(text_string_to_metric_families(response.read().decode()))
            for family in families:
                for sample in family.samples:
                    labels.setdefault(sample.name, set()).update(sample.labels)
            return "mimo_tokenizer_requests_total" in labels

        eventually(complete)
        yield labels
        assert server.stop() == 0
    finally:
        server.clean_up()


def parsed(query: str) -> Any:
    """With values for what Grafana fills in."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(parsed(query), visit)
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(query: str, exposed: dict[str, set[str]]) -> None:
    of_query = selectors(query)
    assert of_query
    for selector in of_query:
        assert selector.name in exposed, f"no server tells {selector.name}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in exposed[selector.name] | OF_PROMETHEUS, f"{selector.name} has no {matcher.name}"

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            wanted = set(node.modifier.labels)
            inner: list[str] = [selector.name for selector in selectors(node.expr.prettify())]
            for name in inner:
                assert wanted <= exposed[name] | OF_PROMETHEUS, f"{name} cannot be summed by {wanted}"

    promql_parser.walk(parsed(query), visit)


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_asked_for_their_rate(query: str) -> None:
    """And gauges are not: a graph of either would be of no use to anybody."""
    within: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.Call) and node.func.name == "rate":
            within.extend(selector.name for selector in selectors(node.args[0].prettify()))

    promql_parser.walk(parsed(query), visit)
    cumulative = ("_total", "_sum", "_count", "_bucket")
    assert sorted(within) == sorted(
        selector.name for selector in selectors(query) if selector.name.endswith(cumulative)
    )


def test_every_metric_of_ours_is_shown(exposed: dict[str, set[str]]) -> None:
    def family(name: str) -> str:
        return name.rsplit("_", 1)[0] if name.endswith(("_bucket", "_sum", "_count")) else name

    shown = {family(selector.name) for query in QUERIES for selector in selectors(query.values[0])}
    ours = {family(name) for name in exposed if name.startswith("mimo_tokenizer_") and not name.endswith("_created")}
    assert ours - shown == set()


def test_variables_ask_for_what_there_is(exposed: dict[str, set[str]]) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inner = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            selector, label = inner.rsplit(", ", 1)
            assert selectors(selector)[0].name in exposed
            assert label in OF_PROMETHEUS


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
