"""Tests of an evaluation's inputs: question sets, models, checkpoints, and config problems that prevent it."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import yaml

from rlsys.apps.evaluation.evaluation_inputs import (
    Baseline,
    EvaluationInputs,
    Model,
    as_hf,
    find_inputs,
    find_model,
    find_sources,
    questions_of,
)
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError, UserError
from rlsys.weights.checkpoint.store import CheckpointStore
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from tests.support.composed import composed
from tests.support.hf_models import assert_same_tensors
from tests.support.refusals import refused
from tests.support.tiny_models import POLICY

DEAD = "http://127.0.0.1:9"


def write_set(file: Path, *sources: str) -> Path:
    """Write one row with each data source."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": f"Who is {n}?", "golden_answers": ["x"], "data_source": name} for n, name in enumerate(sources)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_reported_split_of_each_set_is_evaluated(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write_set(tmp_path / "nq" / f"{split}.jsonl", "nq")
        write_set(tmp_path / "hotpotqa" / f"{split}.jsonl", "hotpotqa")
    found = find_sources(["nq", "hotpotqa"], tmp_path)
    assert [str(one.path.relative_to(tmp_path)) for one in found] == ["nq/test.jsonl", "hotpotqa/dev.jsonl"]


def test_missing_unknown_and_repeated_sets_are_refused(tmp_path: Path) -> None:
    file = write_set(tmp_path / "nq" / "test.jsonl", "nq")
    with refused("not_found", "--data") as caught:
        find_sources(["hotpotqa", "nq", "musique"], tmp_path)
    commands = f"`rlsys data prepare hotpotqa --out {tmp_path} && rlsys data prepare musique --out {tmp_path}`"
    assert commands in str(caught.value), "all missing sets are named at once"
    with refused("unknown", "--data"):
        find_sources(["triviqa"], tmp_path)
    with refused("conflict", "--data"):
        find_sources(["nq", str(file)], tmp_path)


def test_questions_of_files_with_the_same_name_have_different_ids(tmp_path: Path) -> None:
    write_set(tmp_path / "nq" / "test.jsonl", "nq", "nq")
    write_set(tmp_path / "popqa" / "test.jsonl", "popqa", "")
    questions = questions_of(find_sources(["nq", "popqa"], tmp_path), RunConfig())
    assert [one.uid for one in questions] == ["nq/test:1", "nq/test:2", "popqa/test:1", "popqa/test:2"]
    assert [one.data_source for one in questions] == ["nq", "nq", "popqa", "popqa"]


def hf_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a run, with a manifest and a config."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = store.begin(12)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard.bin").write_bytes(b"12345")
    (folder / "data").mkdir()
    original = hf_folder(tmp_path / "original")
    (folder / "data" / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(original)}}))
    return store.publish(12)


def find(path: Path, hf: Path | None = None) -> Model:
    return find_model(path, hf, f"--model {path}")


def test_the_original_model_is_read_from_the_runs_config(saved: Path, tmp_path: Path) -> None:
    expected = Model(saved / "actor", tmp_path / "original", 12)
    assert find(saved / "actor") == find(saved) == expected
    other = hf_folder(tmp_path / "other")
    assert find(saved, other).original == other


def test_an_incomplete_checkpoint_is_refused(saved: Path) -> None:
    (saved / "actor" / "shard.bin").write_bytes(b"123")
    for folder in (saved / "actor", saved):
        with pytest.raises(UserError, match=r"shard\.bin"):
            find(folder)


def test_a_missing_or_superfluous_original_is_refused(saved: Path, tmp_path: Path) -> None:
    bare, original = tmp_path / "bare", tmp_path / "original"
    bare.mkdir()
    with refused("missing", "--hf"):
        find(bare)
    with refused("conflict", "--hf"):
        find(original, original)
    (original / "config.json").unlink()
    with refused("mismatch", original):
        find(saved / "actor")
    with refused("not_found", tmp_path / "nowhere"):
        find(tmp_path / "nowhere")


def test_a_checkpoint_is_converted_temporarily(tmp_path: Path) -> None:
    """The converted folder is removed at the end, also after an error."""
    hf_to_megatron(POLICY, tmp_path / "megatron", processes=1)
    assert find(tmp_path / "megatron").original == tmp_path / "megatron" / "hf"
    work = tmp_path / "work"
    work.mkdir()
    with suppress(ZeroDivisionError), as_hf(find(tmp_path / "megatron"), work) as path:
        assert work in path.parents
        assert_same_tensors(path, POLICY)
        assert (path / "tokenizer.json").is_file()
        raise ZeroDivisionError
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("kinds", "speaks"), [('["GPT2LMHeadModel"]', True), ("null", True), ('["BertForMaskedLM"]', False), ("3", False)]
)
def test_a_model_without_a_language_model_head_is_refused(tmp_path: Path, kinds: str, speaks: bool) -> None:
    folder = hf_folder(tmp_path / "model")
    (folder / "config.json").write_text(f'{{"architectures": {kinds}}}')
    with nullcontext() if speaks else refused("unsupported", folder), as_hf(find(folder), tmp_path) as path:
        assert path == folder


def test_a_critic_is_refused_as_a_policy(tmp_path: Path) -> None:
    """Any engine would load it, with a random output layer."""
    hf_to_megatron(POLICY, tmp_path / "critic", values=True, processes=1)
    megatron_to_hf(tmp_path / "critic", tmp_path / "hf", POLICY, processes=1)
    (tmp_path / "work").mkdir()
    for folder in (tmp_path / "critic", tmp_path / "hf"):
        with refused("mismatch", folder), as_hf(find(folder), tmp_path / "work"):
            pass


@pytest.fixture
def own(tmp_path: Path) -> str:
    """Path of a file of questions, whose content these tests do not read."""
    file = tmp_path / "own.jsonl"
    file.write_text("{}\n")
    return str(file)


def config_of(*overrides: str) -> RunConfig:
    """Return the config of a run without questions, model and index."""
    nothing = ["task.train_path=none", "task.eval_path=none", "model.path=none", "search.index=none"]
    return composed(*nothing, *overrides)


async def want(
    config: RunConfig, *names: str, baseline: Baseline = Baseline.direct, model: Path | None = POLICY
) -> EvaluationInputs:
    return await find_inputs(config, baseline, names, Path("data"), model, None)


async def problems_of(config: RunConfig, *names: str, **flags: object) -> list[str]:
    """Return the first word of each line of the error that refuses the inputs."""
    with pytest.raises(UserError) as caught:
        await want(config, *names, **flags)  # type: ignore[arg-type]
    return [line.partition(" ")[0] for line in str(caught.value).splitlines()]


async def test_the_held_out_questions_of_sources_are_asked_without_their_training_questions(own: str) -> None:
    """The ids are those of an evaluation during the run."""
    Path(own).write_text('{"question": "Q?", "golden_answers": ["a"]}\n')
    none = "task.sources={one: {train_path: none, eval_path: OWN}, two: {train_path: none, eval_path: OWN}}"
    files = ("task.train_path=null", "task.eval_path=null")
    config = config_of(*files, none.replace("OWN", own))
    inputs = await want(config)
    assert [(one.uid, one.source) for one in questions_of(inputs.sources, config)] == [
        ("one/own:1", "one"),
        ("two/own:1", "two"),
    ]
    missing = config_of(*files, none.replace("OWN", "nowhere"))
    assert await problems_of(missing) == [f"task.sources.{name}.eval_path=nowhere" for name in ("one", "two")]
    assert [one.source for one in questions_of((await want(missing, own)).sources, missing)] == [""]


async def test_all_relevant_problems_are_reported_at_once(own: str) -> None:
    assert await problems_of(config_of(), model=None) == ["model.path=none", "task.eval_path=none"]
    broken, rag = config_of("search.topk=0"), Baseline.rag
    assert await problems_of(broken, own, baseline=rag) == ["search.topk=0", "search.index=none"]
    off = config_of("search.enabled=false", "task.agent.invalid_message=no")
    assert await problems_of(off, own, baseline=Baseline.search) == ["--baseline"]
    await want(off, own, baseline=Baseline.none)


async def test_the_server_is_checked_after_the_settings(own: str) -> None:
    with pytest.raises(RunError, match=DEAD):
        await want(config_of(f"search.url={DEAD}"), own, baseline=Baseline.search)
    wrong = config_of(f"search.url={DEAD}", "search.topk=0")
    assert await problems_of(wrong, own, baseline=Baseline.rag) == ["search.topk=0"]
    with pytest.raises(UserError, match=DEAD):
        await want(config_of(f"search.url={DEAD}", "eval.samples=4"), own, baseline=Baseline.rag)
