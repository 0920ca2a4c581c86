"""Tests of the page's model: tokens, index, chunks, damage, changed folders, results of `rlsys eval`."""

import gzip
import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.trajectory import Action
from rlsys.observe.kept import TrajectoryRecord, read_step_trajectories
from rlsys.observe.metrics import UNITS
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import compressed, inline_json
from rlsys.report.run_model import (
    ANSWERS,
    CHUNK,
    QUIET_S,
    SILENT_S,
    ModelCache,
    Phase,
    TrajectoryIndex,
    build,
    liveness_of,
    read_chunk,
    row_of,
    runs_of,
)
from tests.support.answers import SEARCH, answered, asked, turn
from tests.support.damage import LEVELS, holding
from tests.support.made_run import UNITS_OF, Maker, Size, add_measured, made_run

FIGURES = ("advantage", "sampled", "ratio")


def spread(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * count


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.lists(st.sampled_from("pgcx"), max_size=30))
def test_runs_keep_every_token_with_its_figures(seed: int, kinds: list[str]) -> None:
    """Kinds of tokens: p is given text; g and c are trained tokens of two versions; x has no sampled log-prob."""
    draws = np.random.default_rng(seed)
    size = len(kinds)
    mask = np.array([False, False] + [kind != "p" for kind in kinds])
    old = draws.normal(-1, 0.5, size + 2).astype(np.float32)
    sampled = draws.normal(-1, 0.5, size + 2).astype(np.float32)
    sampled[2:][np.array([kind == "x" for kind in kinds], bool)] = np.nan
    turns = np.cumsum(draws.random(size + 2) < 0.2)
    kept: TrajectoryRecord = replace(
        Maker(Size(steps=1)).kept(1, 0, 0),
        prompt_length=2,
        token_ids=np.arange(size + 2, dtype=np.int32),
        pieces=tuple(f"<{place}>" for place in range(size)),
        loss_mask=mask,
        turn_of_token=np.where(mask, turns, -1).astype(np.int32),
        versions=np.array([-1, -1, *({"g": 3, "c": 4}.get(kind, -1) for kind in kinds)], np.int32),
        rollout_logprobs=sampled,
        old_logprobs=old,
        ref_logprobs=None,
        advantages=draws.integers(0, 2, size + 2).astype(np.float32),
    )
    runs = runs_of(kept)
    assert "".join(run.get("text") or "".join(run.get("texts", ())) for run in runs) == "".join(kept.pieces)
    found = [
        (run["ids"][at], run["version"], run["turn"], *(spread(run[name], len(run["ids"]))[at] for name in FIGURES))
        for run in runs
        if "texts" in run
        for at in range(len(run["texts"]))
    ]
    places = np.flatnonzero(mask)
    assert [one[:3] for one in found] == [(at, kept.versions[at], kept.turn_of_token[at]) for at in places]
    for (*_, advantage, of_engine, ratio), place in zip(found, places, strict=True):
        assert advantage == kept.advantages[place]
        if np.isnan(sampled[place]):
            assert of_engine is ratio is None
        else:
            assert of_engine == pytest.approx(sampled[place], abs=1e-4)
            assert ratio == pytest.approx(float(old[place]) - float(sampled[place]), abs=1e-4)


def test_chunks_read_singly_equal_those_handed_over(tmp_path: Path) -> None:
    """Both runs have enough steps and evaluations to fill two chunks each."""
    size = Size(steps=2, groups=CHUNK // 4 + 1, answers=ANSWERS + 3, page=5, thought=4)
    runs = [open_run(made_run(tmp_path / name, Maker(size, seed=seed))) for seed, name in enumerate("ab")]
    chunks: dict[int, list[Any]] = {}
    model = build(runs, chunks.__setitem__)
    assert len(chunks) == 2 * (2 * 2 + 2 * 2), "two steps and two evaluations per run, two chunks each"
    assert json.loads(json.dumps(model, allow_nan=False)) == json.loads(json.dumps(model))
    for number, rows in chunks.items():
        assert read_chunk(runs, model, number) == rows
    assert read_chunk(runs, model, max(chunks) + 1) is None
    for run, of_run in zip(runs, model["runs"], strict=True):
        index = of_run["trajectories"]
        parts = [chunks[index["first_chunk"] + place] for place in range(len(index["chunks"]))]
        assert [len(part) for part in parts] == [count for _, _, count in index["chunks"]]
        rows = [row for part in parts for row in part]
        kept = list(run.trajectories())
        assert [row["prompt"] for row in rows] == [one.prompt for one in kept]
        uids = [index["questions"][number]["uid"] for number in index["columns"]["question"]]
        assert uids == [one.question_uid for one in kept]
        assert index["columns"]["right"] == [int(one.exact) for one in kept]
        assert index["columns"]["searches"] == [size.searches] * len(kept)
        furthest = max(np.nanmax(np.abs((one.old_logprobs - one.rollout_logprobs)[one.loss_mask])) for one in kept)
        assert max(map(abs, index["columns"]["log_ratio"])) == pytest.approx(float(furthest), abs=1e-4)
        last = of_run["evaluations"][-1]
        answers = [one for place in range(last["chunks"]) for one in chunks[last["first_chunk"] + place]]
        assert [one["uid"] for one in answers] == [f"heldout:{number}" for number in range(size.answers)]


def test_lag_is_relative_to_the_trained_policy_not_to_the_scoring_one() -> None:
    """Step 5 trains version 4 on tokens that versions 2 and 3 sampled and version 3 scored."""
    made = Maker().kept(5, 0, 0)
    trained = np.flatnonzero(made.loss_mask)
    versions = made.versions.copy()
    versions[trained] = 3
    versions[trained[0]] = 2
    kept = replace(made, versions=versions, policy_version=3)
    index = TrajectoryIndex()
    index.add(kept)
    found = index.as_json(0)
    assert found is not None
    assert found["columns"]["lag"] == [4 - 2]
    assert row_of(kept)["trained_version"] == 4


VALUES = (LEVELS, b"1%s" % (b"0" * 400), b'"\\ud800"', b"NaN", b"-7", b"1.5", b"null", b"true", b"[1]", b'{"a": 1}')


def with_other_values(line: bytes) -> list[bytes]:
    """Copies of `line`, each with one part replaced by one of `VALUES`; in a list, only the first two items change."""

    def places(tree: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inside = list(tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ())
        return [way, *(found for key, value in inside for found in places(value, (*way, key)))]

    lines = []
    for way in places(json.loads(line))[1:]:
        tree = json.loads(line)
        above = reduce(lambda at, key: at[key], way[:-1], tree)
        above[way[-1]] = "HERE"
        lines += [json.dumps(tree).encode().replace(b'"HERE"', value) for value in VALUES]
    return lines


@pytest.mark.parametrize(
    "name", ["timeline.jsonl", "trajectories/step_000001.jsonl.gz", "evaluations/step_000001.jsonl", "metrics.jsonl"]
)
def test_row_with_any_other_value_is_read_or_reported(tmp_path: Path, name: str) -> None:
    size = Size(steps=1, groups=1, samples=1, prompt=2, searches=1, thought=2, page=1, answers=1)
    folder = made_run(tmp_path / "run", Maker(size))
    file = folder / name
    first = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).splitlines()[0]
    lines = with_other_values(first)
    holding(b"\n".join([first, *lines, b""]))(file)
    runs, taken = [open_run(folder)], dict[int, list[Any]]()
    model = build(runs, taken.__setitem__, audited=False)
    json.loads(inline_json(model))
    assert all(compressed(rows) for rows in taken.values())
    said = sum(name.partition(".")[0] in problem for problem in runs[0].problems)
    assert 0 < said <= len(lines)


def test_units_are_read_unless_they_are_damaged(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", Maker(Size(steps=2)))

    def units() -> dict[str, list[str]]:
        model = build([open_run(folder)], audited=False)
        json.loads(inline_json(model))
        found: dict[str, list[str]] = model["runs"][0]["units"]
        return found

    assert units() == UNITS_OF
    for value in VALUES:
        for text in (value, b'{"time/step": %s}' % value, b'{"time/step": [%s, %s]}' % (value, value)):
            (folder / UNITS).write_bytes(text)
            assert all(len(both) == 2 for both in units().values())
    (folder / UNITS).unlink()
    assert units() == {}


def test_steps_are_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_run(tmp_path / "run", Maker(Size(steps=3)))
    damaged = folder / "trajectories/step_000002.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    read: list[int] = []

    def reading(path: Path, step: int, problem: Any) -> Any:
        read.append(step)
        return read_step_trajectories(path, step, problem)

    monkeypatch.setattr("rlsys.report.run_model.read_step_trajectories", reading)
    memory = ModelCache()

    def same_as_new() -> bool:
        found, new = memory.build(open_run(folder), audited=False), build([open_run(folder)], audited=False)
        return found["runs"] == new["runs"]

    assert same_as_new()
    read.clear()
    memory.build(run := open_run(folder), audited=False)
    assert read == []
    assert any(damaged.name in problem for problem in run.problems), "the damage must be reported again"
    other = made_run(tmp_path / "other", Maker(Size(steps=3), seed=5))
    (other / "trajectories/step_000002.jsonl.gz").replace(damaged)
    (folder / "trajectories/step_000003.jsonl.gz").unlink()
    memory.build(open_run(folder), audited=False)
    assert read == [2]
    assert same_as_new()


@pytest.mark.parametrize(
    ("status", "has_summary", "phase"),
    [
        (None, False, Phase.unknown),
        (None, True, Phase.finished),
        ({"ended": "finished"}, True, Phase.finished),
        ({"ended": "failed: no room"}, False, Phase.failed),
        ({"at": 1000.0, "pid": 1, "host": "here"}, False, Phase.running),
        ({"at": 999.0 - QUIET_S, "pid": 2, "host": "here"}, False, Phase.running),
        ({"at": 999.0 - QUIET_S, "pid": 1, "host": "here"}, False, Phase.gone),
        ({"at": 1001.0 + QUIET_S, "pid": 1, "host": "here"}, False, Phase.gone),
        ({"at": 1001.0 + SILENT_S, "pid": 2, "host": "here"}, False, Phase.running),
        ({"at": 999.0 - SILENT_S, "pid": 1, "host": "there"}, False, Phase.silent),
    ],
    ids=["new", "old", "finished", "failed", "just written", "quiet", "killed", "clock set back", "ahead", "silent"],
)
def test_phase_of_a_run(status: dict[str, Any] | None, has_summary: bool, phase: Phase) -> None:
    """At the time 1000, process 2 of this machine lives, and process 1 does not."""
    assert liveness_of(status, has_summary, 1000.0, "here", lambda pid: pid == 2).phase is phase


def test_measured_results_give_one_row_per_set(tmp_path: Path) -> None:
    """One of 4 answers in nq and both answers in own are right; the expected Wilson interval is from a table."""
    folder = made_run(tmp_path / "run", Maker(Size(steps=1, groups=1)))
    failed = turn(Action.SEARCH, "x", "Search failed", error="no answer")
    answers = [answered(asked(number, "Nile"), said) for number, said in enumerate(["a b", "c", None])]
    answers.append(answered(asked(3, "Nile"), "the Nile", 0, SEARCH, failed))
    answers += [answered(asked(number, "Nile", source="own"), "Nile") for number in (4, 5)]
    late = {"started": "2025-02-01T00:00:00+0000", "baseline": "cot", "engine": "transformers"}
    add_measured(folder, "eval", *answers, **late)
    both = [answered(asked(1, "Nile"), said, sample) for sample, said in enumerate(["Nile", "x"])]
    add_measured(folder, "eval-late", *both, started="2025-01-01", samples=2, temperature=0.5, model="/m")
    rows = build([open_run(folder)])["runs"][0]["measured"]
    assert [(row["folder"], row["set"], row["questions"], row["em"]["mean"]) for row in rows] == [
        ("eval-late", "nq", 1, 0.5),
        ("eval", "nq", 4, 0.25),
        ("eval", "own", 2, 1.0),
        ("eval", None, 6, 0.625),
    ]
    assert rows[1]["em"] == pytest.approx({"mean": 0.25, "low": 0.0456, "high": 0.6994}, abs=5e-5)
    assert [(row["searches"], row["search_errors"]) for row in rows[1:3]] == [(0.5, 1), (0, 0)]
    assert {k: chance["mean"] for k, chance in rows[0]["pass_at"].items()} == {"1": 0.5, "2": 1.0}
    how = [(row["model"], row["engine"], row["baseline"], row["samples"]) for row in rows[:2]]
    assert how == [("/m", "sglang", "none", 2), ("hf", "transformers", "cot", 1)]


@pytest.mark.parametrize(
    ("old", "new"), [('"settings"', '"sets"'), ('"mean": 1.0', '"mean": NaN'), (None, '{"settings": 3, "sets": [1]}')]
)
def test_damaged_results_are_reported_and_the_others_are_read(tmp_path: Path, old: str | None, new: str) -> None:
    folder = made_run(tmp_path / "run", Maker(Size(steps=1, groups=1)))
    damaged, _ = (add_measured(folder, name, answered(asked(1, "Nile"), "Nile")) for name in ("eval", "eval-2"))
    assert old is None or old in damaged.read_text()
    damaged.write_text(damaged.read_text().replace(old, new, 1) if old else new)
    run = build([open_run(folder)])["runs"][0]
    assert [row["folder"] for row in run["measured"]] == ["eval-2"]
    assert [one.split()[0] for one in run["problems"] if one.startswith("eval")] == ["eval/results.json"]


def test_chunks_keep_their_numbers_while_a_run_goes_on(tmp_path: Path) -> None:
    """A page that is already open asks for chunks by their old numbers."""
    folder = made_run(tmp_path / "run", Maker(Size(steps=3)))
    late = [folder / "trajectories/step_000003.jsonl.gz", *folder.glob("evaluations/step_000003.json*")]
    contents = [file.read_bytes() for file in late]
    for file in late:
        file.unlink()
    before: dict[int, Any] = {}
    build([open_run(folder)], before.__setitem__)
    for file, content in zip(late, contents, strict=True):
        file.write_bytes(content)
    after: dict[int, Any] = {}
    build([open_run(folder)], after.__setitem__)
    assert len(after) == len(before) + 2
    assert after.items() >= before.items()
