"""`rlsys audit tokens` on folders of runs: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from rlsys.apps.cli.runs import audit as app
from rlsys.config.schema import TokenMode
from rlsys.errors import Code, UserError
from rlsys.observe.kept import Kept, kept_file, write_kept
from rlsys.report.token_audit import as_json, audit
from tests.report.audit.episodes import CODEC, TOKENIZER, by_letter, played
from tests.rollout.agent.bpe import build_tokenizer

Run = Callable[..., Path]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with the tokenizer that `played` episodes are of."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Run:
    """A run's folder with these trajectories, of step 4."""

    def make(kept: Sequence[Kept], model: str = str(tokenizer), mode: str = "retokenize") -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        config = {"model": {"path": model}, "task": {"token_mode": mode}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "metrics.jsonl").write_text('{"step": 4}\n')
        if kept:
            write_kept(folder, 4, kept)
        return folder

    return make


def episodes(*texts: str, mode: TokenMode = TokenMode.retokenize) -> list[Kept]:
    return [played("x", [(by_letter(text), "\n")], mode, uid=str(number)) for number, text in enumerate(texts)]


def ask(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["tokens", *map(str, arguments)])


def refuses(code: Code, key: str | Path, *arguments: object) -> None:
    problem = ask(*arguments).exception
    assert isinstance(problem, UserError), problem
    assert (problem.code, problem.key) == (code, str(key))
    assert "\n" not in str(problem)


def test_the_figures_are_printed_and_nothing_that_acts_on_the_terminal(run: Run) -> None:
    kept = episodes("Paris </search>", "東京", "\x1b[31mParis", "[bold]capital")
    total = audit(kept, CODEC, TokenMode.retokenize).total
    result = ask(run(kept))
    assert result.exit_code == 0, result.exception
    assert f"{total.drawn_differing} of {total.drawn}" in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout
    assert "[bold]" in result.stdout
    assert result.stderr == "", "that other files are missing is not the audit's to say"


def test_json_is_the_audit_without_steps_that_are_damaged(run: Run) -> None:
    kept = episodes("Paris </search>", "東京", mode=TokenMode.append)
    folder = run(kept, mode="append")
    kept_file(folder, 5).write_bytes(b"no gzip")
    result = ask(folder, "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(as_json(audit(kept, CODEC, TokenMode.append))))
    assert kept_file(folder, 5).name in result.stderr


def test_a_folder_that_cannot_be_audited_is_refused(run: Run, tmp_path: Path) -> None:
    refuses("not_found", tmp_path / "nothing", tmp_path / "nothing")
    refuses("malformed", tmp_path, tmp_path)
    folder = run([])
    refuses("empty", folder, folder)


def test_a_config_without_a_token_mode_is_refused(run: Run) -> None:
    folder = run(episodes("Paris"))
    for config in ("task: 3", "task: {token_mode: both}"):
        (folder / "config.yaml").write_text(config)
        refuses("missing", "task.token_mode", folder)


def test_a_tokenizer_that_is_damaged_is_refused(run: Run, tokenizer: Path) -> None:
    folder = run(episodes("Paris"))
    for content in (b"[]", b"\xff\xfe\x00"):
        (tokenizer / "tokenizer.json").write_bytes(content)
        refuses("malformed", tokenizer, folder)


def test_a_tokenizer_that_is_not_there_or_another_is_asked_for(run: Run, tokenizer: Path, tmp_path: Path) -> None:
    build_tokenizer(words=True).save_pretrained(tmp_path / "other")
    folder = run(episodes("Paris </search>\n\n<information>"), model="Qwen/Qwen2.5-3B")
    refuses("not_found", "model.path", folder)
    refuses("mismatch", "--tokenizer", folder, "--tokenizer", tmp_path / "other")
    assert ask(folder, "--tokenizer", tokenizer).exit_code == 0
