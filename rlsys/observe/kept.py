"""Saves trained trajectories token by token, for the report, the drift analysis and the token audit.

Contract: `select_trajectories` selects whole groups, so that advantages can be explained, and spreads them evenly over
the step, because groups that finish quickly come first. `write_trajectories` writes one file per step, atomically.
`read_trajectories` returns bit-identical values, step by step, and reports whatever it could not read.
`TrajectoryWriter` writes in the background.

A row is JSON: text as text, arrays as lists, NaN as null, float32 with the fewest digits that round-trip. A new field
needs a default, which is used for rows of older files.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rlsys.data.answers import exact_match
from rlsys.data.trajectory import Group, Sample, Trajectory
from rlsys.files import (
    PACKED_BYTES,
    json_safe,
    limited_lines,
    open_atomically,
    open_regular,
    remove_partial_files,
    require_shallow,
)

TRAJECTORIES = "trajectories"
"""Subfolder of the run folder."""
_FILE = re.compile(r"step_(\d+)\.jsonl\.gz")
_LEVEL = 2
"""gzip level. Log-probs hardly compress: level 6 takes three times as long for a file that is 7 % smaller."""
_KINDS: dict[str, Any] = {
    **{"bool": bool, "int": int, "float": int | float | None, "str": str, "str | None": str | None},  # NaN is null.
    **{"Mapping[str, Any]": dict, "Mapping[str, float]": dict},
}
"""Type annotation of a field -> Python types of its JSON value; arrays are converted without this check."""
_FIELDS_NAMED = 3
"""Maximum number of fields named in the error about a row of another version."""
_BROKEN = "\ufffd"
"""Character that a tokenizer shows for invalid or incomplete UTF-8."""
_MAX_PENDING = 16
"""Maximum number of tokens decoded together as one character. A UTF-8 character has at most four bytes, so longer
sequences are invalid."""
_log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids, special tokens included."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of a kept trajectory; fields as in `Turn`."""

    text: str
    action: str
    content: str
    observation: str
    search_error: str
    generate_s: float
    search_s: float
    began_ns: int
    cached_tokens: int
    prompt_tokens: int
    sampled_ids: Ints
    """[sampled] ids that the engine returned; empty if unknown."""
    sampled_logprobs: Floats
    """[sampled] natural log-probs at the sampling temperature."""
    tool: str = ""
    """Name of the called tool; empty without a call."""


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One trajectory as trained. Arrays align with `token_ids`: entry i is about the prediction of token i."""

    step: int
    question_uid: str
    sample: int
    """Index within the prompt group."""
    data_source: str
    extra: Mapping[str, Any]
    """`extra_info` of the question's row in the data set."""
    question: str
    """Question without the prompt template; empty if the data set lacks it."""
    prompt: str
    golden_answers: tuple[str, ...]
    answer: str | None
    exact: bool
    """True if the answer matches an accepted one after SQuAD's normalisation."""
    reward: float
    parts: Mapping[str, float]
    """Reward term -> its value."""
    finish: str
    policy_version: int
    """Weight version that computed `old_logprobs`: the version at the step's start, or an earlier one in an `async`
    schedule, which scores a group as soon as it is rolled out."""
    token_ids: Ints
    """[seq] ids of prompt and response."""
    prompt_length: int
    pieces: tuple[str, ...]
    """[seq - prompt_length] text of each response token, special tokens included; joined, they are the response. A
    character that spans several tokens belongs to the last of them."""
    loss_mask: NDArray[np.bool_]
    turn_of_token: Ints
    """[seq] index of the turn; -1 for tokens that are not trained."""
    versions: Ints
    """[seq] weight version that sampled the token; -1 for tokens that were not sampled."""
    rollout_logprobs: Floats
    """[seq] engine log-probs; NaN where unknown."""
    old_logprobs: Floats
    """[seq] old log-probs; 0 for tokens that are not trained."""
    ref_logprobs: Floats | None
    advantages: Floats
    weights: Floats | None
    turns: tuple[TurnRecord, ...]


class OtherVersion(ValueError):
    """Raised for a row with the fields of another version of rlsys."""


class TrajectoryWriter:
    """Writes `trajectories/` of a run in a background thread, one step at a time.

    `begin` first waits until the previous step is on disk; `finish` waits for the last one. A checkpoint written after
    `finish` therefore has the trajectories of all its steps. Best effort: on a disk error, warns once and stops saving.
    """

    def __init__(self, run_dir: Path, decode: Decode) -> None:
        """`decode` is called from the background thread."""
        self._run_dir, self._decode = run_dir, decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._writing: Future[None] | None = None
        self._refused = False

    async def begin(self, step: int, groups: Sequence[Group], limit: int | None) -> None:
        """Start saving at most `limit` trajectories of the trained `groups` of `step` (None: all).

        `select_trajectories` chooses them.
        """
        await self.finish()
        if limit != 0 and not self._refused:
            self._writing = self._thread.submit(self._write, step, groups, limit)

    async def finish(self) -> None:
        """Wait until the step begun last is on disk. Raises ValueError for a sample without log-probs."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wrap_future(writing)

    def close(self) -> None:
        """Wait for pending writes and stop the thread. Idempotent."""
        self._thread.shutdown()

    def _write(self, step: int, groups: Sequence[Group], limit: int | None) -> None:
        try:
            write_trajectories(self._run_dir, step, select_trajectories(groups, step, limit, self._decode))
        except OSError as problem:
            self._refused = True
            message = "%s could not be written (%s): the run continues without saving further trajectories."
            _log.warning(message, problem.filename, problem.strerror)


def select_trajectories(
    groups: Sequence[Group], step: int, limit: int | None, decode: Decode
) -> Iterator[TrajectoryRecord]:
    """Select at most `limit` trajectories (None: all) of the trained `groups` of `step`.

    Selects whole groups at even distances, and at least one group unless `limit` is 0.
    """
    pieces = Pieces(decode)
    if limit is not None and groups:
        count = min(len(groups), max(limit // max(len(group.samples) for group in groups), min(limit, 1)))
        groups = [groups[place * len(groups) // count] for place in range(count)]
    return (_record_of(group, sample, step, pieces) for group in groups for sample in group.samples)


def write_trajectories(run_dir: Path, step: int, kept: Iterable[TrajectoryRecord]) -> None:
    """Write the trajectories of `step`, replacing an existing file. Raises OSError with the file's name."""
    with (
        open_atomically(trajectory_file(run_dir, step)) as file,
        gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as rows,
    ):
        for trajectory in kept:
            rows.write(write_row(trajectory))


def trajectory_file(run_dir: Path, step: int) -> Path:
    return run_dir / TRAJECTORIES / f"step_{step:06d}.jsonl.gz"


def trajectory_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a trajectory file, in order."""
    found = (_FILE.fullmatch(path.name) for path in (run_dir / TRAJECTORIES).glob("step_*"))
    return sorted(int(name[1]) for name in found if name)


def remove_trajectories_after(run_dir: Path, step: int) -> None:
    """Delete trajectories of steps after `step`, which will be repeated, and leftovers of interrupted writes."""
    remove_partial_files(run_dir / TRAJECTORIES)
    for later in trajectory_steps(run_dir):
        if later > step:
            trajectory_file(run_dir, later).unlink()


def copy_trajectories(run_dir: Path, other: Path, step: int) -> None:
    """Copy the trajectories of steps up to `step` from `run_dir` to the run folder `other`."""
    for earlier in trajectory_steps(run_dir):
        if earlier <= step:
            trajectory_file(other, earlier).parent.mkdir(exist_ok=True)
            shutil.copyfile(trajectory_file(run_dir, earlier), trajectory_file(other, earlier))


def read_trajectories(run_dir: Path, problem: Callable[[str], None]) -> Iterator[TrajectoryRecord]:
    """Yield all kept trajectories, by step and in the order they were written.

    Skips damaged files and rows, and rows of another version of rlsys; calls `problem` with a sentence about each.
    """
    for step in trajectory_steps(run_dir):
        yield from read_step_trajectories(run_dir, step, problem)


def read_step_trajectories(run_dir: Path, step: int, problem: Callable[[str], None]) -> Iterator[TrajectoryRecord]:
    """Yield the kept trajectories of one step; skips and reports as `read_trajectories` does."""
    path = trajectory_file(run_dir, step)
    name, other_told = f"{TRAJECTORIES}/{path.name}", False
    try:
        if not path.stat().st_size:
            problem(f"{name} is empty: left out.")
        for number, line in enumerate(trajectory_lines(path), 1):
            try:
                yield read_row(line)
            except OtherVersion as other:
                if not other_told:
                    problem(f"{name} has rows of another version of rlsys ({other}): left out.")
                other_told = True
            except ValueError:
                problem(f"{name}, row {number} is damaged: left out.")
    except (OSError, EOFError, zlib.error) as damage:
        problem(f"{name} is damaged ({damage}): its remaining rows are left out.")


def trajectory_lines(file: Path) -> Iterator[bytes]:
    """Yield the raw lines of a step's `file`, for `read_row`. Raises OSError, EOFError or zlib.error."""
    with open_regular(file, PACKED_BYTES) as packed, gzip.open(packed) as lines:
        yield from limited_lines(lines)


def write_row(kept: TrajectoryRecord) -> bytes:
    """Write a trajectory as one line of JSON."""
    row = _plain(kept)
    try:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:  # Unpaired surrogates, which data sets may contain.
        return json.dumps(row, default=lambda array: json_safe(array.tolist())).encode() + b"\n"


def read_row(line: bytes | str) -> TrajectoryRecord:
    """Parse a line of `write_row`. Raises OtherVersion for unexpected fields, ValueError for any other damage."""
    try:
        kept = _parse_record(line)
        _require_aligned(kept)
    except (TypeError, LookupError, AttributeError, OverflowError, RecursionError) as damage:
        raise ValueError(f"The row is not a trajectory: {damage}") from damage
    return kept


def _parse_record(line: bytes | str) -> TrajectoryRecord:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = json.loads(line)  # Unpaired surrogates; see `write_row`.
    _require_fields(row, TrajectoryRecord)
    np.int32(row["policy_version"])  # Raises OverflowError if the version does not fit int32, the type of `versions`.
    _require_kinds(row["parts"].values(), int | float | None)
    _require_kinds((*row["pieces"], *row["golden_answers"]), str)
    require_shallow(row["extra"])
    turns = tuple(_read_turn(turn) for turn in row.pop("turns"))
    row |= {"pieces": tuple(row["pieces"]), "golden_answers": tuple(row["golden_answers"]), "turns": turns}
    row |= {name: np.array(row[name], np.int32) for name in ("token_ids", "turn_of_token", "versions")}
    row |= {name: np.array(row[name], np.float32) for name in ("rollout_logprobs", "old_logprobs", "advantages")}
    row |= {
        name: None if row[name] is None else np.array(row[name], np.float32) for name in ("ref_logprobs", "weights")
    }
    return TrajectoryRecord(**row | {"loss_mask": np.array(row["loss_mask"], np.bool_)})


def _record_of(group: Group, sample: Sample, step: int, pieces: Pieces) -> TrajectoryRecord:
    question, path = group.question, sample.trajectory
    if sample.old_logprobs is None:
        raise ValueError(f"Sample {path.sample} of {question.uid} was trained on without log-probs.")
    return TrajectoryRecord(
        **{
            **_same(TrajectoryRecord, question),
            **_same(TrajectoryRecord, path),
            **_same(TrajectoryRecord, sample),
            "step": step,
            "question": question.text,
            "golden_answers": question.answers,
            "exact": path.answer is not None and exact_match(path.answer, question.answers),
            "finish": path.finish.value,
            "policy_version": step - 1 if sample.scored_version is None else sample.scored_version,
            "token_ids": path.tokens,
            "pieces": pieces(path.tokens[path.prompt_length :].tolist()),
            "turns": _turns(path),
        }
    )


def _same(kind: type[TrajectoryRecord | TurnRecord], source: object) -> dict[str, Any]:
    """Return the fields of `kind` that `source` has under the same name."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if hasattr(source, field.name)}


def _turns(path: Trajectory) -> tuple[TurnRecord, ...]:
    ends = np.cumsum([turn.generated_tokens for turn in path.turns])
    known = len(path.turns) > 0 and ends[-1] == len(path.sampled_ids) == len(path.sampled_logprobs)
    starts = [0, *ends[:-1]] if known else [0] * len(path.turns)
    stops = ends if known else starts
    return tuple(
        TurnRecord(
            **_same(TurnRecord, turn)
            | {"action": turn.action.value, "search_s": turn.tool_s, "search_error": turn.tool_error}
            | {"sampled_ids": path.sampled_ids[start:stop], "sampled_logprobs": path.sampled_logprobs[start:stop]}
        )
        for turn, start, stop in zip(path.turns, starts, stops, strict=True)
    )


class Pieces:
    """Splits decoded text into one piece per token.

    `len(pieces) == len(ids)` and `"".join(pieces) == decode(ids)` for any tokenizer. A character that spans several
    tokens belongs to the last of them. If the text of a token depends on its predecessors (SentencePiece drops the
    first space), each token is decoded in context. If that fails too, the first piece is the whole text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return one piece per id."""
        if not ids:
            return ()
        whole = self._decode(ids)
        for cut in (self._each_alone, self._each_after_another):
            pieces = tuple(cut(ids))
            if "".join(pieces) == whole:
                return pieces
        return (whole, *("" for _ in ids[1:]))

    def _each_alone(self, ids: Sequence[int]) -> Iterator[str]:
        """Decode each token by itself, and runs of incomplete characters together."""
        run: list[int] = []
        for token in ids:
            if _BROKEN in (text := self._text(token)):
                run.append(token)
                continue
            yield from self._characters(run)
            run = []
            yield text
        yield from self._characters(run)

    def _characters(self, run: Sequence[int]) -> Iterator[str]:
        """Split a run at character boundaries; an overlong run of invalid bytes is split as well."""
        start = 0
        for end in range(1, len(run) + 1):
            text = self._decode(run[start:end])
            waits = text.endswith(_BROKEN) and end < len(run)
            if waits and (end - start < _MAX_PENDING or not self._decode(run[start : end + 1]).startswith(text)):
                yield ""
            else:
                yield text
                start = end

    def _each_after_another(self, ids: Sequence[int]) -> Iterator[str]:
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[before:end])
            if end < len(ids) and text.endswith(_BROKEN) and end - start < _MAX_PENDING:
                yield ""
                continue
            yield text[len(self._decode(ids[before:start])) :]
            before, start = start, end

    def _text(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._decode([token])
        return self._alone[token]


def _plain(value: Any) -> Any:
    """Convert to JSON types; arrays stay arrays."""
    if isinstance(value, TrajectoryRecord | TurnRecord):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if isinstance(value, tuple) and value and isinstance(value[0], TurnRecord):
        return list(map(_plain, value))
    return json_safe(value)


def _read_turn(row: dict[str, Any]) -> TurnRecord:
    _require_fields(row, TurnRecord)
    ids, logprobs = np.array(row["sampled_ids"], np.int32), np.array(row["sampled_logprobs"], np.float32)
    if ids.ndim != 1 or ids.shape != logprobs.shape:
        raise ValueError("A turn has a different number of log-probs and tokens.")
    return TurnRecord(**row | {"sampled_ids": ids, "sampled_logprobs": logprobs})


def _require_fields(row: dict[str, Any], kind: type[TrajectoryRecord | TurnRecord]) -> None:
    """Raise OtherVersion unless `row` has exactly the fields of `kind`; fields with a default may be absent."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    missing = [name for name in known if known[name] and name not in row]
    unknown = sorted(row.keys() - known)
    if missing or unknown:
        message = [f"without {name}" for name in missing] + [f"with {name}" for name in unknown]
        raise OtherVersion(", ".join(message[:_FIELDS_NAMED]) + (", ..." if len(message) > _FIELDS_NAMED else ""))
    for field in fields(kind):
        if field.name in row:
            _require_kinds([row[field.name]], _KINDS.get(str(field.type), object))


def _require_kinds(values: Iterable[Any], kind: Any) -> None:
    """Raise TypeError for a value that is no instance of `kind`, OverflowError for an int beyond int64."""
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"a {type(value).__name__} is not a {kind}")
        if isinstance(value, int):
            np.int64(value)


def _require_aligned(kept: TrajectoryRecord) -> None:
    """Raise ValueError unless each response token has a piece and each array has one entry per token."""
    values = [getattr(kept, field.name) for field in fields(kept)]
    response = len(kept.token_ids) - kept.prompt_length
    if not 0 <= kept.prompt_length <= len(kept.token_ids) or len(kept.pieces) != response:
        raise ValueError("The row has a different number of response tokens and pieces.")
    if any(isinstance(array, np.ndarray) and array.shape != (len(kept.token_ids),) for array in values):
        raise ValueError("The row has an array whose length is not the number of tokens.")
