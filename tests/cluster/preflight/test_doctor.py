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
from rlsys.errors import UserError

FINDINGS = [
    ok("config", "its settings go together"),
    wrong("disk for the run", "1.0 GiB free in /a [red]b[/red]", "free 5.0 GiB"),
    unknown("1 other machine", "its GPUs", "run the same command there"),
]


def shown(width: int, findings: list[Finding]) -> str:
    file = io.StringIO()
    show("a_run", findings, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 80])
def test_nothing_is_lost_at_any_width(width: int) -> None:
    text = shown(width, FINDINGS)
    assert max(map(len, text.splitlines())) <= width
    together = "".join(text.split())
    for finding in FINDINGS:
        for part in (finding.state, *finding.what.split(), *finding.fix.split()):
            assert part in together
    assert "[red]b[/red]" in together, "what was found is no markup"


def test_the_verdict_names_all_that_is_wrong_and_says_what_was_not_seen() -> None:
    assert FINDINGS[1].what in verdict("a_run", FINDINGS)
    assert "unknown" in verdict("a_run", [FINDINGS[0], FINDINGS[2]])
    assert "unknown" not in verdict("a_run", FINDINGS[:1])
    data = json.loads(json.dumps(as_data("a_run", FINDINGS)))
    assert not data["right"]
    assert [one["state"] for one in data["findings"]] == ["ok", "wrong", "unknown"]


def test_the_tiny_run_can_run_here_and_not_without_its_questions(tmp_path: Path) -> None:
    prepare_world(Console(quiet=True))
    words = ["doctor", "--for", "searchr1_tiny_cpu", "--json", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "rlsys.apps.cli.main", *words]
    good = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert good.returncode == 0, good.stdout
    assert json.loads(good.stdout)["right"]
    bad = CliRunner().invoke(app, [*words, "task.eval_path=none.jsonl", "cluster.nodes=0"])
    assert bad.exit_code == 2
    wrong = [one["what"] for one in json.loads(bad.stdout)["findings"] if one["state"] == "wrong"]
    assert wrong == ["cluster.nodes", "task.eval_path"]
    assert list(tmp_path.iterdir()) == [], "nothing is begun"


@pytest.mark.parametrize(
    "words", [["trainer.steps=3"], ["--json"], ["--launched"], ["--for", "searchr1_tiny_cpu", "--strict"]]
)
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | UserError)
