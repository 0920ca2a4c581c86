"""Tests of the token audit against counts in bytes and against the book-keeping, and of `rlsys audit tokens`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from rlsys.apps.cli.runs import audit as app
from rlsys.config.schema import TokenMode
from rlsys.errors import Code, UserError
from rlsys.observe.kept import TrajectoryRecord, write_trajectories
from rlsys.report.token_audit import OtherTokeniser, audit
from tests.report.audit.episodes import CODEC, TOKENIZER, by_letter, drawn_logprob, played, trained_logprob
from tests.support.bpe import build_tokenizer

RETOKENIZE, APPEND = TokenMode.retokenize, TokenMode.append
ASCII = ["<search>", "</search>", " capital", "\n\n", ">", "Paris", "Doc 1(Title: ", "x", "12"]
TEXTS = st.lists(st.sampled_from(ASCII), min_size=1, max_size=5).map("".join)
CANONICAL = TEXTS.map(CODEC.encode)
BY_CHARACTER = TEXTS.map(by_letter)
TURNS = st.lists(st.tuples(st.one_of(CANONICAL, BY_CHARACTER), TEXTS), min_size=1, max_size=4)


def of_bytes(prompt: str, turns: list[tuple[list[int], str]]) -> tuple[list[int], dict[str, list[float]]]:
    """Return the audit's counts, and log-ratios by kind, from token boundaries in ASCII text (a byte per character).

    The counts are: drawn tokens, differing drawn tokens, trained tokens, differing trained tokens, differing stretches,
    and stretches whose edge lies within a trained token.
    """
    text = prompt + "".join(TOKENIZER.decode(ids) + observation for ids, observation in turns)
    final = TOKENIZER(text)["input_ids"]
    ends = np.cumsum([len(TOKENIZER.decode([token])) for token in final]).tolist()
    counts, ratios = [0] * 6, {"differing": [], "after_change": [], "same": []}
    at, inputs_text = len(prompt), prompt
    for ids, observation in turns:
        inputs = TOKENIZER(inputs_text)["input_ids"]
        own = np.cumsum([len(TOKENIZER.decode([token])) for token in ids]) + at
        stop = int(own[-1])
        cuts = [at, *sorted(set(own.tolist()) & set(ends) & set(range(at + 1, stop))), stop]
        for left, right in pairwise(cuts):
            ours = [n for n, end in enumerate(own) if left < end <= right]
            theirs = [n for n, end in enumerate(ends) if end > left and (ends[n - 1] if n else 0) < right]
            within = [n for n in theirs if (ends[n - 1] if n else 0) >= left and ends[n] <= right]
            differs = [ids[n] for n in ours] != [final[n] for n in theirs]
            sizes = (len(ours), len(ours) * differs, len(within), len(within) * differs, differs, within != theirs)
            counts = [sum(pair) for pair in zip(counts, sizes, strict=True)]
            if within == theirs:
                drawn = sum(drawn_logprob([*inputs, *ids[: n + 1]]) for n in ours)
                value = sum(trained_logprob(final[: n + 1]) for n in theirs) - drawn
                as_drawn = [*inputs, *ids[: ours[-1] + 1]] == final[: theirs[-1] + 1]
                ratios["differing" if differs else "same" if as_drawn else "after_change"].append(value)
        at, inputs_text = stop + len(observation), inputs_text + TOKENIZER.decode(ids) + observation
    return counts, ratios


@settings(max_examples=40)
@given(TEXTS, TURNS)
def test_counts_and_log_ratios_equal_those_by_bytes(prompt: str, turns: list[tuple[list[int], str]]) -> None:
    found = audit([played(prompt, turns)], CODEC, RETOKENIZE)
    counts, ratios = of_bytes(prompt, turns)
    total = found.total
    assert counts == [
        total.sampled,
        total.sampled_differing,
        total.trained,
        total.trained_differing,
        total.stretches,
        found.crossing,
    ]
    assert found.bias is not None
    for kind, values in ratios.items():
        spread = getattr(found.bias, kind)
        assert spread.count == len(values), kind
        if values:
            assert spread.mean == pytest.approx(np.mean(values), abs=1e-6), kind
            assert spread.largest == pytest.approx(np.abs(values).max(), abs=1e-6), kind
    assert found.after_change == len(ratios["after_change"])


@pytest.mark.parametrize(
    ("before", "drawn", "after", "place"),
    [
        ("x", by_letter("</search>"), "x", "tag"),
        ("x", [*CODEC.encode("<search>")], "> x", "tag"),
        ("x", by_letter("東京"), "x", "unicode"),
        ("x", by_letter("Paris"), "\n", "other"),
        ("x", [*CODEC.encode("\xff")[:1]], "x", "broken"),
    ],
)
def test_each_difference_is_counted_under_its_place(before: str, drawn: list[int], after: str, place: str) -> None:
    found = audit([played(before, [(drawn, after)])], CODEC, RETOKENIZE)
    assert list(found.by_place) == [place]
    assert {one.place for one in found.examples} == {place}


@pytest.mark.parametrize("mode", TokenMode)
def test_only_an_untrained_end_of_sequence_token_is_counted_as_lost(mode: TokenMode) -> None:
    drawn = [*CODEC.encode("Paris"), CODEC.eos_id]
    assert audit([played("x", [(drawn, "")], mode)], CODEC, mode).special_lost == 0
    assert audit([played("x", [(drawn, "\n"), (CODEC.encode("x"), "")], mode)], CODEC, mode).special_lost == 1


@pytest.mark.parametrize("mode", TokenMode)
def test_another_tokenizers_tokens_are_refused(mode: TokenMode) -> None:
    one = played("Paris", [(by_letter("Paris"), "\n")], mode)
    ids = one.token_ids.copy()
    ids[0] += 1
    with pytest.raises(OtherTokeniser, match="question q, sample 0"):
        audit([replace(one, token_ids=ids)], CODEC, mode)


Run = Callable[..., Path]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Folder of the tokenizer that `played` uses."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Run:
    """Function that makes a run's folder with the given trajectories of step 4."""

    def make(kept: Sequence[TrajectoryRecord], model: str = str(tokenizer), mode: str = "retokenize") -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        config = {"model": {"path": model}, "task": {"token_mode": mode}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "metrics.jsonl").write_text('{"step": 4}\n')
        if kept:
            write_trajectories(folder, 4, kept)
        return folder

    return make


def episodes(*texts: str, mode: TokenMode = TokenMode.retokenize) -> list[TrajectoryRecord]:
    return [played("x", [(by_letter(text), "\n")], mode, uid=str(number)) for number, text in enumerate(texts)]


def ask(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["tokens", *map(str, arguments)])


def refuses(code: Code, key: str | Path, *arguments: object) -> None:
    problem = ask(*arguments).exception
    assert isinstance(problem, UserError), problem
    assert (problem.code, problem.key) == (code, str(key))
    assert "\n" not in str(problem)


def test_printed_figures_are_right_and_contain_no_control_characters(run: Run) -> None:
    kept = episodes("Paris </search>", "東京", "\x1b[31mParis", "[bold]capital")
    total = audit(kept, CODEC, TokenMode.retokenize).total
    result = ask(run(kept))
    assert result.exit_code == 0, result.exception
    assert f"{total.sampled_differing} of {total.sampled}" in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout
    assert "[bold]" in result.stdout
    assert result.stderr == "", "other missing files must not be reported"


def test_folder_that_cannot_be_audited_is_refused(run: Run, tmp_path: Path) -> None:
    refuses("malformed", tmp_path, tmp_path)
    folder = run([])
    refuses("empty", folder, folder)
    for config in ("task: 3", "task: {token_mode: both}"):
        (folder / "config.yaml").write_text(config)
        refuses("missing", "task.token_mode", folder)
    (folder / "config.yaml").write_text("task: {token_mode: append, agent: {kind: react}}")
    refuses("unsupported", "task.agent.kind", folder)


def test_missing_or_different_tokenizer_is_refused(run: Run, tokenizer: Path, tmp_path: Path) -> None:
    build_tokenizer(words=True).save_pretrained(tmp_path / "other")
    folder = run(episodes("Paris </search>\n\n<information>"), model="Qwen/Qwen2.5-3B")
    refuses("not_found", "model.path", folder)
    refuses("mismatch", "--tokenizer", folder, "--tokenizer", tmp_path / "other")
    assert ask(folder, "--tokenizer", tokenizer).exit_code == 0
