"""Compares predictions of `rlsys plan` with own runs and with step times that others have published.

    python -m bench.plan                       # own runs, see `bench.plan_runs`; writes outputs/bench/plan.json
    python -m bench.plan --published FILE      # writes outputs/bench/plan_published.json
    python -m bench.plan --fit                 # fits the reached shares: writes reached.yaml from bench/published_steps.json

FILE is a list of rows in the form of bench/published_steps.json. A row is predicted if it names a known GPU and model, its
batch, and a measured step; the result says of every other row what it lacks. Everything that a row does not state is the
same for all rows (`Assumed`); nothing is set for one row.

The fit uses every second pair of the rows that can be predicted, in order of id. It minimises the mean absolute logarithm of
predicted / measured over steps and, where a row has them, their stages. To be quick, it computes the stages by formulas
(one engine with its share of the requests, calls of equal ranks) and adds them up, or takes the longer of rollout and
training where they overlap. The comparison simulates whole steps.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from math import ceil, exp, inf, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from numpy.typing import NDArray

from rlsys.apps.planner.costs import by_formula
from rlsys.apps.planner.estimate import calls_s, generation_s, packed
from rlsys.apps.planner.simulation import measured_steps, simulate
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import REACHED_FILE, SPEEDS, Reached, read_reached
from rlsys.cluster.planning.memory import count_parameters
from rlsys.cluster.planning.work import EngineCosts, HardwareCosts
from rlsys.config.algorithm import OldLogprobs
from rlsys.config.derived import max_staleness, on_update
from rlsys.config.schema import (
    AsyncSchedule,
    Device,
    Mode,
    OnUpdate,
    ParallelConfig,
    PipelinedSchedule,
    RunConfig,
    SequentialSchedule,
    SyncMode,
)
from rlsys.trainer.batches import SampleSize
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import Architecture

ROWS = Path(__file__).with_name("published_steps.json")
MODELS = Path(__file__).with_name("plan_models.json")
RESULT = Path("outputs/bench/plan_published.json")
EPISODES = 6_000
"""Episodes that are simulated of each row, in whole steps, after those that fill the pipeline."""
TOGETHER = re.compile(r"colocated|^sync$")
"""Kinds of schedules in which all groups have all devices."""
SUMMED = re.compile(r"colocated|(^|-)sync$")
"""Kinds of schedules without overlap."""
LIKE = 1.3
"""Largest ratio of parameters between a model of unknown shape and the known one whose shape it gets."""
THINKS = re.compile(r"r1|distill|qwq|think|o1|qwen3(?!.*(base|instruct|coder))", re.IGNORECASE)
"""Names of models that think before they answer."""
LONGEST_SHARE = 0.8
"""Largest share of the limit that an assumed mean response has."""
_SHAPE = (
    *("max_positions", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied"),
    *("experts", "experts_per_token", "expert_ffn"),
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """Settings that rows rarely state, the same for all of them."""

    length_share: float
    """Mean response of a model that thinks before it answers, as a share of the limit, where a row has no mean."""
    answer: float
    """Mean tokens of a response of another model, where a row has no mean."""
    spread: float
    """Standard deviation of the logarithm of a response's length, before the limit cuts it off."""
    prompt: int = 110
    """Tokens of a prompt."""
    max_running: int = 1024


class UnpredictableError(Exception):
    """Raised if a row lacks what a prediction needs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row as a config of rlsys."""

    row: Mapping[str, Any]
    config: RunConfig
    model: Architecture
    device: str
    workload: Workload
    engines: int
    lengths: tuple[float, ...]
    """Quantiles of the response's length, in order."""
    held: float
    """Mean samples of a micro-batch."""

    @property
    def measured(self) -> float:
        """Seconds of the published step."""
        return float(self.row["step_seconds"])

    @property
    def summed(self) -> bool:
        """True if the stages of a step do not overlap."""
        return bool(SUMMED.search(self.row["schedule"]["kind"]))


def part(row: Mapping[str, Any], *path: str) -> Any:
    """Return a nested value of a row; None if any part is missing."""
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@cache
def shapes() -> dict[str, Architecture]:
    """Return the architectures that are known, by name in lower case."""
    found = {}
    for name, sizes in json.loads(MODELS.read_text())["models"].items():
        known = dict(zip(_SHAPE, sizes, strict=False))
        found[name.lower()] = Architecture(
            family="qwen2", qkv_bias=True, qk_norm=False, norm_eps=1e-6, rope_theta=1e6, **known
        )
    return found


def model_of(row: Mapping[str, Any]) -> Architecture:
    """Return the shape of a row's model: the longest known name that its name contains, else one of like size."""
    name, size = str(part(row, "model", "name") or "").lower(), part(row, "model", "params_b")
    known = shapes()
    named = [key for key in known if re.search(rf"(^|/){re.escape(key)}(?![\w.]*\d+b)", name)]
    if named:
        return known[max(named, key=len)]
    if not size:
        raise UnpredictableError("model.name is unknown and model.params_b is missing")
    sparse = bool(part(row, "model", "active_b"))
    alike = [one for one in known.values() if bool(one.experts) == sparse]
    near = min(alike, key=lambda one: abs(log(size * 1e9 / count_parameters(one))))
    if not 1 / LIKE < size * 1e9 / count_parameters(near) < LIKE:
        raise UnpredictableError(f"model.name={part(row, 'model', 'name')} has no known shape, and none of like size")
    layers = max(1, round(near.layers * size * 1e9 / count_parameters(near)))
    return replace(near, layers=layers)


def device_of(row: Mapping[str, Any]) -> str:
    """Return the kind of a row's GPUs."""
    text = str(part(row, "hardware", "gpu") or "")
    words = re.findall(r"[A-Z]+\d+", text.upper())
    for name in sorted(SPEEDS, key=len, reverse=True):
        if name in words:
            return name
    raise UnpredictableError(f"hardware.gpu={text or None} has no data sheet")


def case_of(row: Mapping[str, Any], assumed: Assumed) -> Case:
    """Return a row as a config. Raises UnpredictableError."""
    if not part(row, "step_seconds"):
        raise UnpredictableError("step_seconds is missing")
    device, model = device_of(row), model_of(row)
    total, trainers, rollouts = (part(row, "hardware", key) for key in ("total", "trainer", "rollout"))
    kind = str(part(row, "schedule", "kind") or "")
    together = bool(TOGETHER.search(kind))
    if not together and not (trainers and rollouts):
        raise UnpredictableError("hardware.trainer or hardware.rollout is missing")
    if not (total or trainers):
        raise UnpredictableError("hardware.total is missing")
    prompts, samples = part(row, "batch", "prompts"), part(row, "batch", "samples_per_prompt")
    sequences = part(row, "batch", "sequences")
    if not samples:
        prompts, samples = sequences, 1
    if not prompts:
        raise UnpredictableError("batch.prompts, samples_per_prompt and sequences are missing")
    config = RunConfig()
    _place(config, row, model, device, together, (total or trainers) if together else trainers, rollouts)
    _schedule(config, row, kind)
    config.trainer.prompts_per_step, config.algorithm.n_samples = int(prompts), int(samples)
    config.trainer.mini_batches = _mini_batches(row, int(prompts), int(samples))
    workload = _lengths(config, row, model, assumed)
    for settings in (config.actor, config.inference):
        settings.micro_batch_tokens = config.task.max_total_tokens
    config.rollout.engine.max_running = assumed.max_running
    engines = len(range(*_span(config.cluster.placement["rollout"]))) // config.rollout.engine.tp
    # These systems have the episodes of one step in flight, or of as many as may be ahead.
    ahead = part(row, "schedule", "staleness")
    steps = max(1.0, ahead) if isinstance(ahead, int | float) else 1.0
    config.rollout.max_episodes = ceil(steps * int(prompts) / engines) * int(samples)
    lengths = np.clip(workload.turn * np.exp(workload.spread * quantiles() - workload.spread**2 / 2), 1, None)
    lengths = np.minimum(lengths, config.task.max_turn_tokens)
    held = packed((workload.prompt + lengths).tolist(), config.actor.micro_batch_tokens)
    return Case(row, config, model, device, workload, engines, tuple(lengths.tolist()), held)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) + 1


def _place(
    config: RunConfig,
    row: Mapping[str, Any],
    model: Architecture,
    device: str,
    together: bool,
    trainers: int,
    rollouts: int,
) -> None:
    cluster, speed = config.cluster, SPEEDS[device]
    cluster.device, cluster.devices_per_node, cluster.device_memory_gib = (
        Device.gpu,
        speed.per_machine,
        speed.memory_gib,
    )
    first = f"0-{trainers - 1}" if trainers > 1 else "0"
    others = first if together else f"{trainers}-{trainers + rollouts - 1}" if rollouts > 1 else f"{trainers}"
    cluster.placement = {"actor": first, "inference": first, "rollout": others}
    cluster.mode = Mode.colocated if together else Mode.disaggregated
    cluster.sync_mode = SyncMode.ipc if together else SyncMode.broadcast
    train = part(row, "parallel", "train") or {}
    sizes = {key: int(train.get(key) or 1) for key in ("tp", "pp", "cp", "ep")}
    sizes["cp"] = max(sizes["cp"], int(train["sp"]) if isinstance(train.get("sp"), int) else 1)
    if trainers % (sizes["tp"] * sizes["pp"] * sizes["cp"]) or model.layers % sizes["pp"]:
        sizes = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
    if not model.experts:
        sizes["ep"] = 1
    parallel = ParallelConfig(**sizes, sequence_parallel=sizes["tp"] > 1)
    config.actor.parallel = config.inference.parallel = parallel
    held = len(range(*_span(others)))
    tp = int(part(row, "parallel", "rollout", "tp") or 1)
    weights = count_parameters(model) * 2
    while held % tp == 0 and tp < held and weights / tp > 0.6 * speed.memory_gib * 2**30:
        tp *= 2
    if tp > held or held % tp:
        raise UnpredictableError(f"{held} devices of rollouts do not fit tensor parallelism {tp}")
    config.rollout.engine.tp = tp
    config.model.recompute = False


def _schedule(config: RunConfig, row: Mapping[str, Any], kind: str) -> None:
    ahead = part(row, "schedule", "staleness")
    if SUMMED.search(kind):
        config.trainer.schedule = SequentialSchedule(kind="sequential")
    elif kind in ("async", "one-step-off", "disaggregated"):
        bound = max(1, ceil(ahead if isinstance(ahead, int | float) else 1))
        goes_on = kind == "async" or part(row, "schedule", "in_flight_weight_updates")
        going = OnUpdate["continue"] if goes_on else OnUpdate.finish
        config.trainer.schedule = AsyncSchedule(kind="async", max_staleness=bound, on_update=going)
    else:
        raise UnpredictableError(f"schedule.kind={kind or None} is unknown")
    if kind == "disaggregated":
        config.trainer.schedule = PipelinedSchedule(kind="pipelined")
    system = str(part(row, "system") or "").lower()
    times = part(row, "breakdown_seconds") or {}
    # NeMo RL's recipes have a KL term. veRL's fully asynchronous trainer takes the log-probs of its engines.
    config.algorithm.kl_coef = 0.01 if "nemo" in system or times.get("ref") or times.get("logprob_and_ref") else 0.0
    config.algorithm.eval_ref_policy = False
    if "verl" in system and kind == "async":
        config.algorithm.old_logprobs = OldLogprobs.engine


def _mini_batches(row: Mapping[str, Any], prompts: int, samples: int) -> int:
    stated = part(row, "batch", "minibatch")
    if isinstance(stated, int | float):
        return max(1, round(prompts / stated))
    number = re.search(r"\d+", str(stated or ""))
    if number is None:
        return 1
    count = int(number[0])
    return max(1, min(prompts, count if "update" in str(stated) else round(prompts * samples / count)))


def _lengths(config: RunConfig, row: Mapping[str, Any], model: Architecture, assumed: Assumed) -> Workload:
    response, prompt, total = (part(row, "lengths", key) for key in ("max_response", "max_prompt", "max_total"))
    mean, whole = part(row, "lengths", "mean_response"), part(row, "lengths", "mean_total")
    longest = response or (total - assumed.prompt if total else None)
    if mean is None and whole is not None:
        mean = whole - assumed.prompt
    if mean is None and longest is None:
        raise UnpredictableError("lengths.mean_response and every limit are missing")
    # A limit beyond the model's positions means that the run extended them.
    longest = int(longest or min(8 * mean, model.max_positions - assumed.prompt))
    if mean is None:
        thinks = THINKS.search(str(part(row, "model", "name")))
        mean = min(assumed.length_share * longest if thinks else assumed.answer, LONGEST_SHARE * longest)
    mean = min(mean, 0.99 * longest)
    task = config.task
    task.max_turns, task.max_turn_tokens, task.max_prompt_tokens = 0, longest, max(assumed.prompt, int(prompt or 0))
    task.max_total_tokens = longest + assumed.prompt
    return Workload(
        prompt=assumed.prompt, turn=_before_limit(mean, longest, assumed.spread), spread=assumed.spread, calls=0
    )


def _before_limit(mean: float, limit: float, spread: float) -> float:
    """Return the mean of a log-normal length whose mean is `mean` when `limit` cuts it off."""

    def cut(whole: float) -> float:
        if not spread:
            return min(whole, limit)
        centre = log(whole) - spread**2 / 2
        at = (log(limit) - centre) / spread
        return whole * NormalDist().cdf(at - spread) + limit * (1 - NormalDist().cdf(at))

    low, high = mean, limit * 1e4
    for _ in range(80):
        middle = sqrt(low * high)
        low, high = (middle, high) if cut(middle) < mean else (low, middle)
    return low


def steady_generation_s(
    engine: EngineCosts, lengths: Sequence[float], prompt: float, requests: float, slots: float, samples: int
) -> float:
    """Return the seconds in which an engine ends `requests` responses while others begin.

    It has `slots` for responses. A prompt group holds its `samples` slots until its longest response has ended, so on
    average a slot is in use for a share of mean length / longest of `samples` of the time. They share the room of their
    prompt, but each of them prefills it, because they begin together, and each decode step reads it for each. A long
    response is in flight for longer, so the mean length of those in flight is the mean square / twice the mean so far.
    `lengths` are sorted.
    """
    mean = fmean(lengths)
    own = fmean(length * length for length in lengths) / (2 * mean)
    most = engine.cache_tokens / (prompt / samples + own)
    room = min(slots * mean / longest_of(lengths, samples), engine.max_running, most)
    if room < 1:
        return inf
    step = engine.decode_s(max(1, round(room)), room * (prompt + own))[0]
    return requests * (mean / room * step + engine.fill_s(prompt, 0))


def longest_of(lengths: Sequence[float], count: int) -> float:
    """Return the expected longest of `count` lengths that are drawn from the sorted `lengths`."""
    total = len(lengths)
    return sum(
        length * (((number + 1) / total) ** count - (number / total) ** count) for number, length in enumerate(lengths)
    )


def stages_of(case: Case, reached: Reached) -> dict[str, float]:
    """Return the seconds of a step's stages without overlap: one engine's share, and calls of equal ranks."""
    config = case.config
    costs = by_formula(HardwareCosts(config, case.model, case.device, reached), "")
    requests = config.trainer.prompts_per_step * config.algorithm.n_samples
    prompt, mean = case.workload.prompt, fmean(case.lengths)
    share, lengths = requests / case.engines, case.lengths
    times = {"generation": generation_s(costs.engine, lengths, prompt, share)}
    if max_staleness(config) and on_update(config) is OnUpdate["continue"]:
        slots, samples = config.rollout.max_episodes, config.algorithm.n_samples
        times["generation"] = steady_generation_s(costs.engine, lengths, prompt, share, slots, samples)
    parallel = config.actor.parallel
    copies = len(range(*_span(config.cluster.placement["actor"]))) // (parallel.tp * parallel.pp * parallel.cp)
    for name, call in costs.calls.items():
        updates = config.trainer.mini_batches if name == "actor" else 1
        size = SampleSize(round(prompt + mean), round(mean))
        times["update" if name == "actor" else "scores"] = calls_s(call, size, requests / copies, case.held, updates)
    times["rest"] = costs.step_s + costs.sync.nbytes * costs.sync.engine_s + costs.sync.activate_s
    times["rest"] += sum(map(sum, costs.switches.values()))
    return times


@cache
def quantiles(count: int = 128) -> NDArray[np.float64]:
    """Return `count` quantiles of the normal distribution, in order."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])


def predict(case: Case, reached: Reached) -> float:
    """Return the simulated seconds of a step."""
    costs = by_formula(HardwareCosts(case.config, case.model, case.device, reached), "")
    # A system that updates weights in flight goes on with the cache that the old weights have filled.
    keeps = bool(part(case.row, "schedule", "in_flight_weight_updates"))
    costs = replace(costs, sync=replace(costs.sync, keeps_cache=keeps))
    steps = measured_steps(case.config, EPISODES)
    whole = hands_over_steps(case.row)
    return simulate(case.config, costs, case.workload, flops_of(case.model), steps, whole=whole).step_s


def hands_over_steps(row: Mapping[str, Any]) -> bool:
    """Return True if a row's system trains on whole steps, and so counts staleness in steps; others take samples."""
    unit = str(part(row, "schedule", "staleness_unit"))
    return row["schedule"]["kind"] == "one-step-off" or unit.startswith("steps")


def cases_of(rows: Iterable[Mapping[str, Any]], assumed: Assumed) -> tuple[list[Case], dict[str, str]]:
    """Return the rows that can be predicted, and for each other row why not, by id."""
    cases, refused = [], {}
    for number, row in enumerate(rows):
        try:
            cases.append(case_of(row, assumed))
        except UnpredictableError as problem:
            refused[str(row.get("id", number))] = str(problem)
    return cases, refused


def fitted_rows(cases: Sequence[Case]) -> list[str]:
    """Return the ids of the rows that a fit uses: every second pair of neighbours, at most half.

    Neighbours in the order of ids are mostly runs with and without overlap, so that both kinds are on both sides.
    """
    return [name for number, name in enumerate(sorted(str(case.row["id"]) for case in cases)) if number // 2 % 2]


def loss(cases: Sequence[Case], reached: Reached) -> float:
    """Return the mean absolute logarithm of predicted / measured, over steps and stages."""
    errors: list[float] = []
    for case in cases:
        times, known = stages_of(case, reached), case.row.get("breakdown_seconds") or {}
        rest = times["rest"]
        trains = times["update"] + times.get("scores", 0.0)
        step = times["generation"] + trains if case.summed else max(times["generation"], trains)
        weight = 3 if part(case.row, "lengths", "mean_response") else 1
        errors += [abs(log((step + rest) / case.measured))] * weight
        stages = {name: known.get(name) for name in ("generation", "update")}
        stages["scores"] = (known.get("logprob") or 0) + (known.get("ref") or 0)
        errors += [abs(log(times[name] / seconds)) / 2 for name, seconds in stages.items() if seconds]
    return fmean(errors)


BOUNDS = {
    "compute": (0.3, 0.85),
    "memory": (0.4, 0.9),
    "expert_compute": (0.05, 1.0),
    "activation_reads": (10.0, 100.0),
    "decode_layer_s": (1e-5, 1e-3),
    "decode_expert_s": (1e-5, 1e-3),
    "exchange_s": (5e-6, 5e-5),
    "layer_s": (2e-5, 5e-4),
    "expert_layer_s": (2e-5, 1e-2),
    "request_s": (5e-6, 5e-4),
    "step_s": (0.5, 60.0),
    "length_share": (0.3, 0.8),
    "answer": (300.0, 3000.0),
    "spread": (0.6, 1.2),
}
"""Fitted quantity -> the range that is searched, in logarithms."""


def fit(
    rows: Sequence[Mapping[str, Any]], tries: int, assumed: Assumed, seed: int = 0
) -> tuple[Reached, Assumed, float]:
    """Search the quantities of `BOUNDS` at random, ever closer to the best; return them and the loss.

    The search begins at the package's values and `assumed`.
    """
    rng = random.Random(seed)
    base = asdict(read_reached()[0])
    best = {name: (asdict(assumed) | base)[name] for name in BOUNDS}

    def parts(values: Mapping[str, float]) -> tuple[Reached, Assumed]:
        own = {name: value for name, value in values.items() if name in base}
        return Reached(**{**base, **own}), replace(
            assumed, **{name: values[name] for name in BOUNDS if name not in base}
        )

    cases = lru_cache(maxsize=2)(lambda assumed: cases_of(rows, assumed)[0])
    reached, assumed = parts(best)
    least = loss(cases(assumed), reached)
    for number in range(tries):
        width = 0.5 * (1 - number / tries) + 0.02
        trial = dict(best)
        for name in rng.sample([*BOUNDS], rng.choice([1, 2, 3])):
            low, high = BOUNDS[name]
            trial[name] = min(high, max(low, trial[name] * exp(rng.gauss(0, width))))
        reached, assumed = parts(trial)
        found = loss(cases(assumed), reached)
        if found < least:
            best, least = trial, found
    return (*parts(best), least)


def compare(
    rows: Sequence[Mapping[str, Any]], reached: Reached, assumed: Assumed, fitted: Sequence[str]
) -> dict[str, Any]:
    """Predict all rows; return the result of the comparison."""
    cases, refused = cases_of(rows, assumed)
    found = []
    for case in cases:
        predicted = predict(case, reached)
        found.append(
            {
                "id": case.row.get("id"),
                "family": case.row.get("family"),
                "kind": case.row["schedule"]["kind"],
                "predicted": predicted,
                "measured": case.measured,
                "error": abs(predicted / case.measured - 1),
                "fitted": case.row.get("id") in fitted,
                "lengths": "published" if part(case.row, "lengths", "mean_response") else "assumed",
            }
        )
    held_out = [one["error"] for one in found if not one["fitted"]]
    pairs = speedups(cases, {one["id"]: one["predicted"] for one in found})
    slower = [one for one in pairs if one["measured"] < 1]
    return {
        "median_error": median(held_out) if held_out else None,
        "median_error_of_fitted": median([one["error"] for one in found if one["fitted"]] or [0.0]),
        "speedup_error": median([one["error"] for one in pairs]) if pairs else None,
        "inversions_right": all(one["predicted"] < 1 for one in slower) if slower else None,
        "rows": found,
        "speedups": pairs,
        "refused": refused,
        "assumed": asdict(assumed),
        "reached": asdict(reached),
    }


def speedups(cases: Sequence[Case], predicted: Mapping[Any, float]) -> list[dict[str, Any]]:
    """Return the speed-up of each row with overlap over the row without, of one family, version, model and GPU count."""
    pairs = []
    for fast in cases:
        for slow in cases:
            same = all(
                part(fast.row, *path) == part(slow.row, *path)
                for path in (("family",), ("system",), ("model", "name"), ("hardware", "total"))
            )
            if not same or fast.device != slow.device or fast.summed or not slow.summed:
                continue
            measured = slow.measured / fast.measured
            found = predicted[slow.row["id"]] / predicted[fast.row["id"]]
            pairs.append(
                {
                    "sync": slow.row["id"],
                    "async": fast.row["id"],
                    "measured": measured,
                    "predicted": found,
                    "error": abs(found / measured - 1),
                }
            )
    return pairs


def write_reached(reached: Reached, assumed: Assumed, rows: Sequence[str]) -> None:
    """Write the reached shares, the assumptions of the fit, and the rows that it used."""
    head = REACHED_FILE.read_text().partition("values:")[0]
    content = {
        "values": {name: float(f"{value:.3g}") for name, value in asdict(reached).items()},
        "assumed": {name: float(f"{value:.3g}") for name, value in asdict(assumed).items() if name in BOUNDS},
        "source": f"fitted on {len(rows)} published step times of other systems, by `python -m bench.plan --fit`",
        "fitted": [*rows],
    }
    REACHED_FILE.write_text(head + yaml.safe_dump(content, sort_keys=False, width=110))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that describe whole steps."""
    return [row for row in json.loads(path.read_text()) if row.get("kind", "step") == "step"]


def main(
    published: Annotated[Path | None, typer.Option(help="File of published step times.")] = None,
    fit_: Annotated[bool, typer.Option("--fit", help="Fit the reached shares.")] = False,
    tries: Annotated[int, typer.Option(help="Tries of the fit.")] = 400,
    only: Annotated[list[str] | None, typer.Option(help="Run of `bench.plan_runs`; may be repeated.")] = None,
) -> None:
    """Compare predictions with own runs, or with published step times."""
    if published is None and not fit_:
        from bench.plan_runs import compare_runs  # Loads torch.

        compare_runs(only or ())
        return
    content = yaml.safe_load(REACHED_FILE.read_text())
    assumed = Assumed(**content["assumed"])
    if fit_:
        rows = read_rows(ROWS)
        chosen = fitted_rows(cases_of(rows, assumed)[0])
        reached, assumed, least = fit([row for row in rows if row["id"] in chosen], tries, assumed)
        write_reached(reached, assumed, chosen)
        typer.echo(f"{least:.3f} of {len(chosen)} rows")
    if published is not None:
        reached, _ = read_reached()
        result = compare(read_rows(published), reached, assumed, content.get("fitted", []))
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1))
        typer.echo({key: result[key] for key in ("median_error", "speedup_error", "inversions_right")})


if __name__ == "__main__":
    typer.run(main)
