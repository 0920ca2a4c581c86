"""Writes synthetic run folders of any size with the project's own writers, drawn from a seed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlsys.apps.evaluation.results import RESULTS, write_results
from rlsys.observe.environment import Launch
from rlsys.observe.faults import FAULTS, Change, FaultKind, FaultLog, Outcome
from rlsys.observe.kept import TrajectoryRecord, TurnRecord, write_trajectories
from rlsys.observe.metrics import UNITS
from rlsys.observe.records import TIMELINE, LineLog, timeline_row
from rlsys.observe.spans import Span
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation

_SENTENCE = """the of in a city country capital river was born which is north near market bridge council founded by population
language museum 1896 treaty province film album director season island railway university"""
WORDS = tuple(_SENTENCE.split())
DAY = 1_790_000_000
UNITS_OF = {
    **{"reward/exact_match": ["share", "episodes whose answer matches exactly"], "time/step": ["s", "the step"]},
    **{name: ["share", ""] for name in ("idle/actor", "batch/fill/actor", "batch/fill/inference", "staleness/lag_1")},
}
"""Contents of units.json."""


@dataclass(frozen=True, slots=True)
class Size:
    steps: int = 3
    groups: int = 4
    samples: int = 4
    prompt: int = 12
    searches: int = 2
    thought: int = 12
    """Number of generated tokens per turn."""
    page: int = 40
    """Number of tokens per observation."""
    answers: int = 30
    """Answers per evaluation; one evaluation is before the first step, another after the last."""


@dataclass(slots=True)
class Maker:
    """Draws the parts of a run; generated and retrieved tokens have their texts from `words`."""

    size: Size = Size()
    words: Sequence[str] = WORDS
    lag: int = 1
    """Largest staleness of a token, in weight versions."""
    seed: int = 0
    _draws: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._draws = np.random.default_rng(self.seed)

    def text(self, count: int) -> tuple[str, ...]:
        """Texts of `count` random tokens."""
        return tuple(f" {self.words[place]}" for place in self._draws.integers(len(self.words), size=count))

    def kept(self, step: int, group: int, sample: int) -> TrajectoryRecord:
        """Trajectory with `size.searches` searches and an answer."""
        size, draws = self.size, self._draws
        pieces: list[str] = []
        mask: list[bool] = []
        turn_of: list[int] = []
        turns = []
        right = bool(draws.random() < min(0.9, 0.2 + 0.7 * step / size.steps))
        for turn in range(size.searches + 1):
            last = turn == size.searches
            said = self.text(size.thought)
            seen = () if last else self.text(size.page)
            pieces += said + seen
            mask += [True] * len(said) + [False] * len(seen)
            turn_of += [turn] * len(said) + [-1] * len(seen)
            turns.append(
                TurnRecord(
                    text="".join(said),
                    action="answer" if last else "search",
                    content="".join(said[-3:]),
                    observation="".join(seen),
                    search_error="",
                    generate_s=0.4,
                    search_s=0.0 if last else 0.03,
                    began_ns=DAY * 10**9,
                    cached_tokens=8,
                    prompt_tokens=20,
                    sampled_ids=np.arange(len(said), dtype=np.int32),
                    sampled_logprobs=np.full(len(said), -0.5, np.float32),
                )
            )
        trained = np.array([False] * size.prompt + mask)
        length = len(trained)
        sampled = np.where(trained, -draws.exponential(0.4, length), np.nan).astype(np.float32)
        old = np.where(trained, sampled + draws.normal(0, 0.01, length), 0).astype(np.float32)
        version = max(0, step - 1 - int(draws.integers(self.lag + 1)))
        return TrajectoryRecord(
            step=step,
            question_uid=f"train:{step}-{group}",
            sample=sample,
            data_source="made",
            extra={"hops": group % 2 + 1},
            question=f"Question {group} of step {step}:{''.join(self.text(6))}?",
            prompt="".join(self.text(size.prompt)),
            golden_answers=("Khartoum", self.words[0]),
            answer="Khartoum" if right else self.words[-1],
            exact=right,
            reward=float(right),
            parts={"correct_answer": float(right)},
            finish="answer",
            policy_version=step - 1,
            token_ids=draws.integers(150_000, size=length).astype(np.int32),
            prompt_length=size.prompt,
            pieces=tuple(pieces),
            loss_mask=trained,
            turn_of_token=np.array([-1] * size.prompt + turn_of, np.int32),
            versions=np.where(trained, version, -1).astype(np.int32),
            rollout_logprobs=sampled,
            old_logprobs=old,
            ref_logprobs=(old - 0.1 * trained).astype(np.float32),
            advantages=np.where(trained, 1.0 if right else -1.0, 0.0).astype(np.float32),
            weights=None,
            turns=tuple(turns),
        )

    def metrics(self, step: int) -> dict[str, Any]:
        """Row of metrics.jsonl for `step`."""
        done, noise = step / self.size.steps, float(self._draws.normal(0, 0.01))
        return {
            "step": step,
            "time": DAY + 60.0 * step,
            "critic/score/mean": 0.2 + 0.7 * done + noise,
            "reward/exact_match": 0.2 + 0.65 * done + noise,
            "actor/entropy": 1.2 - 0.9 * done + noise,
            "kl/k3": 0.02 * done + abs(noise),
            "actor/grad_norm": 0.4 + noise,
            "response_length/mean": 900 + 700 * done,
            "env/number_of_valid_search": 0.4 + 1.6 * done,
            "rollout/tokens_per_s": 5000 + 900 * done,
            "time/step": 9 + noise,
            "idle/actor": 0.3 + noise,
            "batch/fill/actor": 0.8 + noise,
            "batch/fill/inference": 0.6 + noise,
            "staleness/mean": 0.4,
            "state_tokens/total": 1000 if step == 1 else 3000,
            **({"staleness/lag_0": 1.0} if step == 1 else {"staleness/lag_1": 1.0}),
            "guard/entropy": float(done > 0.95),
        }

    def answers(self, after: int) -> list[dict[str, Any]]:
        """Rows of the answers in the evaluation after step `after`."""
        return [
            {
                "set": "made",
                "uid": f"heldout:{number}",
                "sample": 0,
                "question": f"Held-out {number}:{''.join(self.text(5))}?",
                "golden_answers": ["Khartoum"],
                "answer": "Khartoum" if (right := (number * 7 % 10 < 2 + 6 * bool(after))) else self.words[-1],
                "em": float(right),
                "f1": float(right),
                "sub_em": float(right),
                "finish": "answer",
                "searches": 2,
                "search_errors": 0,
                "tokens": 30,
                "response": "".join(self.text(60)),
            }
            for number in range(self.size.answers)
        ]


def made_run(folder: Path, maker: Maker | None = None, **settings: Any) -> Path:
    """Write a run of `maker` to `folder`, with `settings` in its config. Returns `folder`."""
    maker = maker or Maker()
    size = maker.size
    (folder / "evaluations").mkdir(parents=True)
    config = {"name": "made", "trainer": {"steps": size.steps}, "model": {"path": "nowhere"}, **settings}
    config |= {"rollout": {"sampling": {"temperature": 1.0}}, "task": {"token_mode": "append"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    life = Launch(DAY, 0, {"host": "here", "python": "3.11"}, "abc", True, ["rlsys", "train", "a b"])
    (folder / "run.json").write_text(json.dumps({"lives": [asdict(life)]}))
    (folder / UNITS).write_text(json.dumps(UNITS_OF))
    _write_lines(folder / "metrics.jsonl", [maker.metrics(step) for step in range(1, size.steps + 1)])
    for after in (0, size.steps):
        answers = maker.answers(after)
        em = sum(one["em"] for one in answers) / len(answers)
        row = {"step": after, "questions": len(answers), "em": em, "em_by_hop": {}, "searches": 2.0}
        stem = folder / "evaluations" / f"step_{after:06d}"
        stem.with_suffix(".json").write_text(json.dumps(row | {"figures": {"em": em, "f1": em, "em/made": em}}))
        _write_lines(stem.with_suffix(".jsonl"), answers)
    _write_timeline(folder, size.steps)
    for step in range(1, size.steps + 1):
        pairs = [(group, sample) for group in range(size.groups) for sample in range(size.samples)]
        write_trajectories(folder, step, [maker.kept(step, *pair) for pair in pairs])
    (folder / "summary.json").write_text('{"em_after": 0.8}')
    return folder


def _write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_faults(run: Path, *, part: str = "engine 1", detail: str = "SIGKILL; 3 prompt groups run again") -> Path:
    """Write three faults into `run`: one recovered after 12.5 s, one given up after 60 s, one not over. Returns the file."""
    now = [DAY + 20.0]
    log = FaultLog(run / FAULTS, lambda: now[0])
    ends = ((12.5, Outcome.recovered, "restarted at version 1"), (60.0, Outcome.given_up, "no answer"), (0.0, None, ""))
    failed = ((part, FaultKind.died), ("search server", FaultKind.hung), ("actor rank 0", FaultKind.unreachable))
    for step, ((name, kind), (seconds, outcome, ending)) in enumerate(zip(failed, ends, strict=True), 1):
        log.step = step
        fault = log.begin(name, kind, detail)
        now[0] += seconds
        if outcome is not None:
            log.end(fault, outcome, ending)
    log.close()
    return run / FAULTS


def add_changes(run: Path) -> None:
    """Let engine 2 join in step 2 of `run`, and leave in step 3."""
    now = [DAY + 30.0]
    log = FaultLog(run / FAULTS, lambda: now[0])
    for log.step, change, said in ((2, Change.joined, "with weight version 1 in 31 s"), (3, Change.left, "after 4 s")):
        log.note("engine 2", change, said)
        now[0] += 9.0
    log.close()


def add_measured(run: Path, name: str, *answers: Answered, **settings: Any) -> Path:
    """Write `answers` into folder `name` of `run`, as `rlsys eval` does. Returns the path of results.json."""
    out = run / name
    asked = {"model": str(run / "hf"), "engine": "sglang", "baseline": "none", "samples": 1, "temperature": 0.0}
    write_results(Evaluation(0, answers), out, {**asked, **settings}, 1, seed=0)
    return out / RESULTS


def _write_timeline(folder: Path, steps: int) -> None:
    """Write steps of 9 s: 4 s of rollout (3 s generation, 1 s search), 2 s of log-probs and 3 s of training."""
    log = LineLog(folder / TIMELINE)
    parts = (
        ("rollout.group", 0, 4, "rollout", "engine 0"),
        ("generate.turns", 0, 3, "rollout", "engine 0"),
        ("search.queries", 3, 4, "rollout", "engine 0"),
        ("logprob.compute", 4, 6, "inference", "main"),
        ("train.accumulate", 6, 8, "actor", "main"),
        ("train.apply", 8, 9, "actor", "main"),
    )
    for step in range(1, steps + 1):
        begun = (DAY + 10 * step) * 10**9
        spans = [
            Span(name, begun + start * 10**9, begun + end * 10**9, group, lane, {"step": step})
            for name, start, end, group, lane in parts
        ]
        log.append(timeline_row(step, (begun, begun + 9 * 10**9), spans))
    log.close()
