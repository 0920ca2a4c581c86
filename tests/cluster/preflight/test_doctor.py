"""`rlsys doctor --for CONFIG`: what it prints, and its exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.searchr1.tiny.demo import prepare_world
from rlsys.apps.cli.main import app
from rlsys.cluster.preflight.examine import Finding, as_data, ok, show, unknown, verdict, wrong

FINDINGS = [
    ok("config", "its settings go together"),
    wrong("disk for the run", "1.0 GiB free in /a [red]b[/red]", "free 5.0 GiB"),
    unknown("1 other machine", "its GPUs", "run the same command there"),
]


def shown(width: int, findings: list[Finding]) -> str:
    file = io.StringIO()
    show("a_run", findings, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 56, 80, 200])
def test_nothing_is_lost_at_any_width(width: int) -> None:
    text = shown(width, FINDINGS)
    assert max(map(len, text.splitlines())) <= width
    together = "".join(text.split())
    for finding in FINDINGS:
        for part in (finding.state, *finding.what.split(), *finding.fix.split()):
            assert part in together
    assert "[red]b[/red]" in together, "what was found is no markup"


def test_the_verdict_claims_no_more_than_was_seen() -> None:
    assert verdict("a_run", FINDINGS).startswith("1 thing is to be mended before a_run can run: disk for the run.")
    assert "as far as it is seen from here; 1 could not" in verdict("a_run", [FINDINGS[0], FINDINGS[2]])
    assert verdict("a_run", FINDINGS[:1]) == "a_run can run here."


def test_programs_read_the_same() -> None:
    data = json.loads(json.dumps(as_data("a_run", FINDINGS)))
    assert not data["right"]
    assert [one["state"] for one in data["findings"]] == ["ok", "wrong", "unknown"]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_tiny_run_can_run_here_and_not_without_its_questions(tmp_path: Path) -> None:
    prepare_world(Console(quiet=True))
    good = doctor("--for", "searchr1_tiny_cpu", "--json", f"output_dir={tmp_path}")
    assert good.returncode == 0, good.stdout
    assert json.loads(good.stdout)["right"]
    bad = CliRunner().invoke(
        app, ["doctor", "--for", "searchr1_tiny_cpu", "task.eval_path=none.jsonl", "cluster.nodes=0"]
    )
    assert bad.exit_code == 2
    told = " ".join(bad.stdout.split())
    assert "2 things are to be mended before searchr1_tiny_cpu can run: cluster.nodes, task.eval_path." in told
    assert list(tmp_path.iterdir()) == [], "nothing is begun"


@pytest.mark.parametrize(
    "words", [["trainer.steps=3"], ["--json"], ["--launched"], ["--for", "searchr1_tiny_cpu", "--strict"]]
)
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
