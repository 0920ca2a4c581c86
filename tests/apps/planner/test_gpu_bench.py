"""Tests of shares that a GPU bench measured: planted ones come back from a file in the form that `bench.gpu` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.figures import FULL, PROMPT_TOKENS, Figure, Outcome, work_of
from rlsys.apps.planner.gpu_bench import GpuBench, read_bench
from rlsys.cluster.planning.hardware import REACHED
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.schema import RunConfig
from rlsys.errors import Code
from rlsys.trainer.batches import SampleSize
from rlsys.weights.weight_map import read_architecture
from tests.support.refusals import refused

PLANTED = replace(REACHED, compute=0.5, layer_s=2e-4, decode_layer_s=1e-4, request_s=4e-5, sync_link=0.3)


def figures_of(reached: Any) -> dict[str, list[Figure]]:
    """Return the figures of a GPU that reaches these shares, by part."""
    config = RunConfig()
    config.cluster.placement = {"actor": "0", "inference": "1", "rollout": "2"}
    config.model.path = str(FULL.shape)
    work = HardwareCosts(config, read_architecture(config.model.path), "H100", reached)
    call, engine, steps, rounds = work.calls()["actor"], work.engine(), [], []
    for sequences in FULL.sequences:
        batch = call.batch_s([SampleSize(FULL.length, round(FULL.trained * FULL.length))] * sequences)
        seconds = FULL.micro_batches * batch + call.apply_s - reached.call_s
        steps += [
            Figure(f"{sequences * FULL.length} tokens, {way}: step", seconds * more, "s")
            for way, more in (("recomputed", 1.3), ("kept", 1.0))
        ]
    for count in FULL.requests:
        context = count * (PROMPT_TOKENS + FULL.new_tokens / 2)
        seconds = FULL.new_tokens * engine.decode_s(count, context)[0]
        seconds += engine.weights_s + count * engine.fill_s(PROMPT_TOKENS, 0)
        rounds.append(Figure(f"{count} requests", count * FULL.new_tokens / seconds, "tokens/s"))
    return {"te": steps, "engine": rounds, "sync": [Figure("tensor", reached.sync_link * 64, "GB/s")]}


def written(path: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
    parts = {name: asdict(Outcome(figures)) for name, figures in figures_of(PLANTED).items()}
    content = {"device": "1 x NVIDIA H100 80GB HBM3", "work": work_of(FULL), "parts": parts}
    change(content)
    path.write_text(json.dumps(content, default=str))
    return path


def test_planted_shares_come_back_and_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "gpu.json")
    found, source = read_bench(path, "H100").reached(REACHED, "fitted")
    assert asdict(found) == pytest.approx(asdict(PLANTED), rel=1e-6)
    assert str(path) in source
    assert source.startswith("compute, layer_s, decode_layer_s, request_s, sync_link measured on H100")
    assert source.endswith("others fitted")


def test_a_part_that_was_not_measured_leaves_its_shares(tmp_path: Path) -> None:
    path = written(tmp_path / "gpu.json", lambda content: content["parts"].pop("te"))
    found, _ = read_bench(path, "H100").reached(REACHED, "fitted")
    assert (found.compute, found.layer_s) == (REACHED.compute, REACHED.layer_s)
    assert found.sync_link == pytest.approx(PLANTED.sync_link)


def test_steps_beyond_the_peak_are_refused(tmp_path: Path) -> None:
    bench = read_bench(written(tmp_path / "gpu.json"), "H100")
    faster = {name: seconds / 10 for name, seconds in bench.parts["te"].items()}
    with refused("conflict", "--bench"):
        GpuBench(bench.path, bench.device, bench.work, {"te": faster}).reached(REACHED, "")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda content: content.pop("work"), "malformed"),
        (lambda content: content.update(device="8 x NVIDIA H200"), "mismatch"),
        (lambda content: content["work"].update(shape="policy"), "unknown"),
        (lambda content: content["parts"].clear(), "missing"),
    ],
)
def test_a_file_that_says_nothing_of_this_gpu_is_refused(
    change: Callable[[dict[str, Any]], None], code: Code, tmp_path: Path
) -> None:
    with refused(code, "--bench"):
        read_bench(written(tmp_path / "gpu.json", change), "H100").reached(REACHED, "")
