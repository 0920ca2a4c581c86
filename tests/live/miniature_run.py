"""Runs of tiny models for two steps, in which all groups must compute the same model."""

import json
from pathlib import Path

import yaml

from rlsys.config.compose import as_dict, load_config
from rlsys.config.derived import has_critic
from rlsys.config.schema import RunConfig
from tests.support.jsonl import read_rows
from tests.support.runs import NO_SEARCH, PATIENT, succeed
from tests.support.tiny_models import even_tokens

REWARD = f"{even_tokens.__module__}.{even_tokens.__name__}"


def tiny_run(model: Path) -> RunConfig:
    """Config of a run of `model` on CPUs; miniatures take their sizes from this config."""
    return load_config(
        "searchr1_tiny_cpu",
        [
            *PATIENT,
            f"model.path={model}",
            "trainer.steps=2",
            "trainer.prompts_per_step=8",
            "trainer.mini_batches=2",
            "task.max_turns=1",
            *NO_SEARCH,
            "eval.interval=0",
            "eval.limit=4",
            "rollout.engine.kv_cache_tokens=16384",
            "tracking.wandb=false",
            "tracking.tensorboard=false",
            f"reward.terms.{REWARD}=1.0",
        ],
    )


def train_two_steps(config: RunConfig, folder: Path) -> None:
    """Run `rlsys train`, and check that all groups have computed the same model."""
    folder.mkdir()
    settings = {"defaults": ["rlsys_schema", "_self_"], **as_dict(config), "output_dir": str(folder / "out")}
    (folder / f"{config.name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    succeed("train", "--config-dir", folder, "-c", config.name)
    (run,) = (folder / "out").iterdir()
    rows = read_rows(run / "metrics.jsonl")
    assert json.loads((run / "summary.json").read_text())["steps"] == len(rows) == 2
    for step, row in enumerate(rows, start=1):
        versions = [value for key, value in row.items() if key.startswith("engine/") and key.endswith("/version")]
        assert set(versions) == {step}, "every engine must have the newest version"
        assert 0 < row["logprob/max_diff"] < 1e-3, "the engines and Megatron must compute the same model"
        assert row["actor/first_ratio_dev_max"] < 1e-3, "so must the Megatron groups, each with its own parallelism"
        assert row["actor/grad_norm"] > 0
    if has_critic(config.algorithm):
        assert rows[1]["critic/values/max"] > rows[1]["critic/values/min"]
