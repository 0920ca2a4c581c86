"""Which machines serve searches, and what the run is told of them."""

from __future__ import annotations

import pytest

from rlsys.cluster.launch.role import check_searching, search_settings, serving_positions
from rlsys.config.compose import load_config
from rlsys.config.schema import CassetteConfig, ClusterConfig, RunConfig, SearchConfig, SearchNodesConfig
from rlsys.errors import UserError

HOSTS = [(0, "gpu-a"), (1, "gpu-b.example.org"), (12, "1")]


def _run(nodes: list[str], **search: object) -> RunConfig:
    return RunConfig(
        cluster=ClusterConfig(search=SearchNodesConfig(nodes=nodes)),
        search=SearchConfig(**{"index": "somewhere", **search}),
    )


def test_machines_are_found_by_rank_and_by_host_name() -> None:
    assert serving_positions(_run(["12", "gpu-b", "gpu-a"]), HOSTS) == [2, 1, 0]
    assert serving_positions(_run(["gpu-b.example.org"]), HOSTS) == [1]
    assert serving_positions(_run(["1"]), HOSTS) == [1], "a rank goes before a host of that name"
    assert serving_positions(_run([]), HOSTS) == []
    played = _run(["0"], cassette=CassetteConfig(path="calls.jsonl"))
    assert serving_positions(played, HOSTS) == [], "a played cassette needs no server"
    with pytest.raises(UserError, match=r"cluster\.search\.nodes: there is no machine gpu-c among 0 \(gpu-a\), 1"):
        serving_positions(_run(["gpu-c"]), HOSTS)


def test_servers_that_nobody_would_use_are_refused() -> None:
    check_searching(_run([]))
    check_searching(_run(["0"]))
    with pytest.raises(UserError, match=r"search\.url=http://a:1 and cluster\.search\.nodes=.* leave one out"):
        check_searching(_run(["0"], url="http://a:1"))


@pytest.mark.parametrize("urls", [["http://10.0.0.1:8000"], ["http://a:1", "http://b:2", "http://[fd00::1]:3"]])
def test_the_settings_are_what_the_config_then_says(urls: list[str]) -> None:
    settings = search_settings(SearchConfig(), urls, {"RLSYS_SEARCH_TOKEN": "s3cret"})
    search = load_config("searchr1_tiny_cpu", settings).search
    assert [search.url, *search.replicas] == urls
    assert search.token_env == "RLSYS_SEARCH_TOKEN"
    assert load_config("searchr1_tiny_cpu", search_settings(SearchConfig(), urls, {})).search.token_env is None
