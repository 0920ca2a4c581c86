"""Tests of the files in launch/: they run a valid command, and request the machines of their config."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import typer
import yaml

from rlsys.apps.cli.training import launch as command
from rlsys.cluster.launch.role import check_searching, serving_positions
from rlsys.config.compose import load_config
from tests.support.paths import PROJECT

SBATCH = PROJECT / "launch" / "slurm" / "train.sbatch"
RAYJOB = PROJECT / "launch" / "kubernetes" / "rayjob.yaml"
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "$0.words"
exit 7
"""


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the parameters that `rlsys launch` reads from `words`."""
    app = typer.Typer()
    app.command()(command)
    return typer.main.get_command(app).make_context("launch", words).params


def test_slurm_file_runs_the_launcher_on_each_machine_and_returns_its_status(tmp_path: Path) -> None:
    for name, script in (("srun", SRUN), ("python", "#!/bin/sh\nexit 0\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    python = str(tmp_path / "python")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "PYTHON": python}

    def given(*words: str, **more: str) -> list[str]:
        done = subprocess.run(["bash", str(SBATCH), *words], cwd=tmp_path, env=kept | settings | more, check=False)
        assert done.returncode == 7
        return (tmp_path / "srun.words").read_text().splitlines()

    words = given("cluster.search.nodes=[0, node-1]", "search.index=/a b")
    assert {"--ntasks-per-node=1", "--cpu-bind=none"} <= set(words)
    launcher = words.index(python)
    assert words[launcher : launcher + 4] == [python, "-m", "rlsys.apps.cli.main", "launch"]
    params = parsed(words[launcher + 4 :])
    config = load_config(params["config_name"], params["overrides"])
    check_searching(config)
    assert (config.search.index, params["wait"]) == ("/a b", 600)
    # The file requests the machines of the config that it names.
    assert f"#SBATCH --nodes={config.cluster.nodes}\n" in SBATCH.read_text()
    assert f"#SBATCH --gpus-per-node={config.cluster.devices_per_node}\n" in SBATCH.read_text()
    # A job that keeps its other machines is not requeued.
    page = (PROJECT / "docs" / "how-to" / "several-machines.md").read_text()
    assert "#SBATCH --no-kill\n" in SBATCH.read_text()
    assert re.findall(r"`sbatch --requeue(.*?)`", page) == [" --no-kill=off"]
    words = given("searchr1_tiny_cpu", "trainer.steps=3", WAIT_S="9")
    params = parsed(words[words.index("launch") + 1 :])
    found = (params["config_name"], params["overrides"], params["wait"])
    assert found == ("searchr1_tiny_cpu", ["trainer.steps=3"], 9)


def test_kubernetes_job_has_the_machines_that_its_config_needs() -> None:
    job = yaml.safe_load(RAYJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["rlsys", "launch"]
    params = parsed(words[2:])
    assert params["cluster"] == "auto"
    config = load_config(params["config_name"], params["overrides"])
    check_searching(config)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}, "all pods reach the dashboard, which can run code"
    (workers,) = cluster["workerGroupSpecs"]
    assert 1 + workers["replicas"] == config.cluster.nodes
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.cluster.devices_per_node
    hosts = [(rank, f"pod-{rank}") for rank in range(config.cluster.nodes)]
    assert serving_positions(config, hosts)
