"""The files of launch/: what they run is a command that is there, and fits the config that they name."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import typer
import yaml

from rlsys.apps.cli.training import launch as command
from rlsys.cluster.launch.role import check_searching, serving_positions
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from tests.support.paths import PROJECT

SBATCH = PROJECT / "launch" / "slurm" / "train.sbatch"
BARE = PROJECT / "launch" / "ray" / "launch.sh"
RAYJOB = PROJECT / "launch" / "kubernetes" / "rayjob.yaml"
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "$0.words"
exit 7
"""


def parsed(words: list[str]) -> dict[str, Any]:
    """What `rlsys launch` takes `words` for."""
    app = typer.Typer()
    app.command()(command)
    return typer.main.get_command(app).make_context("launch", words).params


def composed(params: dict[str, Any]) -> RunConfig:
    config = load_config(params["config_name"], params["overrides"] or ())
    check_searching(config)
    return config


def run(script: Path, *words: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(script), *words], cwd=cwd, env=kept | settings, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip


def test_slurms_file_runs_the_launcher_once_a_machine_and_passes_its_status_on(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    for file in (srun, python):
        file.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ["cluster.search.nodes=[0, node-1]", "search.index=/a b"]
    done = run(SBATCH, *words, cwd=tmp_path, PATH=path, SLURM_JOB_ID="1", PYTHON=str(python))
    assert done.returncode == 7, done.stderr
    given = (tmp_path / "srun.words").read_text().splitlines()
    assert "--ntasks-per-node=1" in given
    assert "--cpu-bind=none" in given
    launcher = given.index(str(python))
    assert given[launcher : launcher + 4] == [str(python), "-m", "rlsys.apps.cli.main", "launch"]
    params = parsed(given[launcher + 4 :])
    config = composed(params)
    assert config.search.index == "/a b"
    assert params["wait"] == 600
    # The file's own number of machines is that of its own config.
    assert f"#SBATCH --nodes={config.cluster.nodes}\n" in SBATCH.read_text()
    assert f"#SBATCH --gpus-per-node={config.cluster.devices_per_node}\n" in SBATCH.read_text()
    other = ["searchr1_tiny_cpu", "trainer.steps=3"]
    assert (
        run(SBATCH, *other, cwd=tmp_path, PATH=path, SLURM_JOB_ID="1", WAIT_S="9", PYTHON=str(python)).returncode == 7
    )
    given = (tmp_path / "srun.words").read_text().splitlines()
    params = parsed(given[given.index("launch") + 1 :])
    assert (params["config_name"], params["overrides"], params["wait"]) == (other[0], other[1:], 9)


def test_scripts_say_what_is_missing(tmp_path: Path) -> None:
    outside = run(SBATCH, cwd=tmp_path)
    assert (outside.returncode, outside.stdout) == (2, "")
    assert "sbatch" in outside.stderr
    for script, settings in ((BARE, {}), (SBATCH, {"SLURM_JOB_ID": "1"})):
        lacking = run(script, "--config-name", "x", cwd=tmp_path, PYTHON="/nowhere", **settings)
        assert (lacking.returncode, lacking.stdout) == (2, "")
        assert "PYTHON=/nowhere" in lacking.stderr


def test_the_kubernetes_job_has_the_machines_that_its_config_needs() -> None:
    job = yaml.safe_load(RAYJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["rlsys", "launch"]
    params = parsed(words[2:])
    assert params["cluster"] == "auto"
    config = composed(params)
    assert config.search.url is None
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}, "all pods see the dashboard, at which code can be run"
    (workers,) = cluster["workerGroupSpecs"]
    assert 1 + workers["replicas"] == config.cluster.nodes
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.cluster.devices_per_node
    hosts = [(rank, f"pod-{rank}") for rank in range(config.cluster.nodes)]
    assert serving_positions(config, hosts)
