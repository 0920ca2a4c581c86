"""Translates a YAML file in RLinf's dialect, with the keys of its Search-R1 example, to our settings.

Contract: `translate` returns settings with the meaning of the file. It raises one `UserError` with a line for each key
that is unknown or has an unsupported value; the error takes its code and key from the first line. No key is ignored
silently except those that `rules()` marks as idle. Overrides may be in either dialect.

`rules()` maps RLinf's keys to ours. An idle key does not affect learning; a joint key is combined with others by a
function below. rlinf.yaml has the keys that need no code.

Intended differences that no key controls:
- A turn that neither searches nor answers gets the invalid message, and the episode continues.
- Stop strings reach the engine.
- max_new_tokens applies to each turn.
- seq_length bounds prompt, turns and observations together. RLinf's agent loop bounds turns and observations by
  seq_length - max_prompt_length.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.errors import UserError, first_line

WHOLE_VOCABULARY = 1_000_000
"""RLinf's `top_k` for no limit; above the size of any vocabulary."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Passes a converted value to the keys `ours`. Without `ours`, only checks that the value matches
    what rlsys always does."""

    ours: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    """RLinf's value -> ours; None keeps our default. Raises ValueError for an unsupported value; its text says what to
    write instead."""


def _one_of(choices: Mapping[Any, Any], instead: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value not in list(choices):
            raise ValueError(instead)
        return choices[value]

    return convert


def _server(address: Any) -> str:
    """Convert `host:port` to a URL; 0.0.0.0 becomes 127.0.0.1."""
    host, _, port = str(address).removeprefix("http://").rstrip("/").removesuffix("/retrieve").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("write HOST:PORT, such as 127.0.0.1:8000")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _one_path(paths: Any) -> str:
    listed = [paths] if isinstance(paths, str) else paths
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        raise ValueError("name one file; `rlsys data prepare merge` merges several")
    return listed[0]


def _trackers(names: Any) -> dict[str, bool]:
    given = set(names) if isinstance(names, list) else {names}
    if given - {"tensorboard", "wandb"}:
        raise ValueError("name tensorboard, wandb, both or none ([])")
    return {"tensorboard": "tensorboard" in given, "wandb": "wandb" in given}


def _top_k(value: Any) -> Any:
    return -1 if value in (None, 0) or int(value) >= WHOLE_VOCABULARY else value


def _turns(generations: Any) -> int:
    """Convert RLinf's number of generations, which counts the answer, to `task.max_turns`, which does not count it."""
    if not isinstance(generations, int) or generations < 1:
        raise ValueError("write the number of generations, at least 1")
    return generations - 1


OFFLOADS = ("actor.offload_optimizer", "actor.offload_weight", "actor.offload_grad")

_CONVERTED = {
    "runner.logger.logger_backends": Moved(("tracking",), _trackers),
    "runner.val_check_interval": Moved(("eval.interval",), lambda steps: 0 if steps == -1 else steps),
    "runner.save_interval": Moved(("checkpoint.interval",), lambda steps: 0 if steps == -1 else steps),
    "algorithm.sampling_params.top_k": Moved(("rollout.sampling.top_k",), _top_k),
    "agentloop.maxturn": Moved(("task.max_turns",), _turns),
    "agentloop.max_turns": Moved(("task.max_turns",), _turns),
    "tools.search.server_addr": Moved(("search.url",), _server),
    "data.train_data_paths": Moved(("task.train_path",), _one_path),
    "data.val_data_paths": Moved(("task.eval_path",), _one_path),
    "data.data_size": Moved(("eval.limit",), lambda count: None if count == -1 else count),
    "reward.reward_scale": Moved(("reward.terms",), lambda scale: {"exact_match": float(scale)}),
    "rollout.enforce_eager": Moved(("rollout.engine.cuda_graphs",), lambda eager: not eager),
    "actor.megatron.distributed_timeout_minutes": Moved(
        ("cluster.call_timeout_s",), lambda minutes: 60.0 * float(minutes)
    ),
}


@cache
def rules() -> dict[str, Moved | None]:
    """Return the rule of each RLinf key. None accepts any value: the key is idle or joint."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    moved = {theirs: Moved((ours,)) for theirs, ours in table["moved"].items()}
    chosen = {key: Moved(tuple(ours), _one_of(choices, how)) for key, (ours, choices, how) in table["chosen"].items()}
    only = {key: Moved((), _one_of(dict.fromkeys(values), how)) for key, (values, how) in table["only"].items()}
    return {**_CONVERTED, **moved, **chosen, **only, **dict.fromkeys([*table["idle"], *table["joint"]])}


IDLE_BRANCHES = (
    "hydra",
    "rollout.vllm",
    "actor.megatron.ckpt_convertor",
    "actor.megatron.profiler",
    "reward.tokenizer",
)
"""Branches of RLinf's config that are ignored: Hydra, unused engines and tools, and duplicates of other keys."""

DEVICES_PER_NODE = 8
"""Number of devices per node with the placement `all`; the machine of RLinf's example has 8."""

PLACEMENT = "cluster.component_placement"
_PLACED = ("actor", "inference", "rollout")
_UNPLACED = ("reward", "agentloop", "agent")
"""RLinf's groups that need no device in rlsys, because they run beside the driver."""
_ONLY_THEIRS = ("runner", "data", "agentloop", "tools", *IDLE_BRANCHES)
_RESOLVERS = {
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
    "not": lambda value: not value,
}
"""RLinf's functions in `${...}`."""


@dataclass(slots=True)
class _Draft:
    """Translation in progress."""

    given: Mapping[str, Any]
    """RLinf's dotted key -> value."""
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our dotted key -> value and the RLinf key that set it."""
    problems: list[UserError] = field(default_factory=list)

    @property
    def is_evaluation(self) -> bool:
        """True if the file describes an evaluation only."""
        return self.given.get("runner.task_type") == "reasoning_eval" or bool(self.given.get("rollout.is_eval"))

    def put(self, ours: str, value: Any, theirs: str) -> None:
        """Set our key `ours` to `value`, converted from RLinf's key `theirs`. Records a problem if another RLinf key
        has set a different value. None keeps our default."""
        if value is None:
            return
        before = self.settings.setdefault(ours, (value, theirs))
        if before[0] != value:
            sentence = f"{before[1]} and {theirs} set {ours} to different values: give both the same value."
            self.problems.append(UserError(sentence, code="conflict", key=theirs))

    def refuse(self, key: str, instead: str) -> None:
        """Record that the value of `key` is unsupported."""
        sentence = f"{key}={shown(self.given.get(key))} is not supported: {instead}."
        self.problems.append(UserError(sentence, code="unsupported", key=key))


def is_rlinf(file: Path) -> bool:
    """True if `file` is in RLinf's dialect: it has a key `runner`, where our files have `trainer`."""
    try:
        tree = OmegaConf.load(file)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError):
        return False  # The function that loads the file next reports the error.
    return isinstance(tree, DictConfig) and "runner" in tree


def translate(file: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of `file` under our keys, nested, and the overrides of our keys, such as trainer.seed=5.

    An override of an RLinf key, such as runner.max_steps=5, has the same effect as that value in the file.
    """
    theirs = [override for override in overrides if _is_theirs(override)]
    draft = _Draft(dict(_leaves(_read(file, theirs))))
    _by_table(draft)
    for part in (_defaults, _task, _required, _placement, _lengths, _steps, _clip, _sampling, _engine):
        part(draft)
    if draft.problems:
        lines = "\n".join(f"{file}: {problem}" for problem in draft.problems)
        raise UserError(lines, code=draft.problems[0].code, key=draft.problems[0].key)
    tree = OmegaConf.create()
    for key, (value, _) in draft.settings.items():
        OmegaConf.update(tree, key, value, force_add=True)
    settings = OmegaConf.to_container(tree)
    assert isinstance(settings, dict)
    ours = [override for override in overrides if override not in theirs]
    return {str(key): value for key, value in settings.items()}, ours


def _is_theirs(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+")
    return key in rules() or any(f"{key}.".startswith(f"{one}.") for one in (*_ONLY_THEIRS, PLACEMENT))


def _read(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Load `file` with `overrides` and resolve its references."""
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        tree = OmegaConf.load(file)
        for override in overrides:
            key, _, text = override.lstrip("+").partition("=")
            OmegaConf.update(tree, key, OmegaConf.from_dotlist([f"value={text}"]).value, merge=False, force_add=True)
        container = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError) as problem:
        sentence = f"{file}: {first_line(problem)}: correct the value."
        raise UserError(sentence, code="malformed", key=str(file)) from problem
    finally:
        for name in _RESOLVERS:
            OmegaConf.clear_resolver(name)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each leaf; a placement is one value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key != PLACEMENT:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _by_table(draft: _Draft) -> None:
    """Apply the rule of each key."""
    for key, value in draft.given.items():
        if any(f"{key}.".startswith(f"{branch}.") for branch in IDLE_BRANCHES):
            continue
        match rules().get(key):
            case None if key not in rules():
                close = difflib.get_close_matches(key, rules(), n=1, cutoff=0.6)
                hint = f"did you mean {close[0]}?" if close else "remove it."
                sentence = f"{key} is not a key of RLinf's Search-R1 example that rlsys supports: {hint}"
                draft.problems.append(UserError(sentence, code="unknown", key=key))
            case Moved(ours, convert):
                try:
                    converted = convert(value)
                except (ValueError, TypeError) as problem:
                    draft.refuse(key, str(problem))
                    continue
                for one in ours:
                    draft.put(one, converted, key)


def _defaults(draft: _Draft) -> None:
    """Refuse Hydra defaults that include other files: only one file is translated."""
    listed = draft.given.get("defaults") or []
    names = [str(next(iter(one))) if isinstance(one, dict) else str(one) for one in listed]
    if any(name != "_self_" and not name.removeprefix("override ").startswith("hydra/") for name in names):
        draft.refuse("defaults", "put all keys into this file")


def _task(draft: _Draft) -> None:
    if draft.given.get("runner.task_type", "reasoning") not in ("reasoning", "reasoning_eval"):
        draft.refuse("runner.task_type", "write reasoning, or reasoning_eval for an evaluation")
    if not draft.is_evaluation and draft.given.get("data.shuffle") is False:
        draft.refuse("data.shuffle", "questions are shuffled, by data.seed; write True")
    size = "algorithm.group_size"
    draft.put("eval.samples" if draft.is_evaluation else "algorithm.n_samples", draft.given.get(size), size)
    half = draft.given.get("actor.optim.bf16")
    dtype = draft.settings.get("model.dtype")
    if half is not None and dtype is not None and half != (dtype[0] == "bfloat16"):
        draft.refuse("actor.optim.bf16", f"{dtype[1]} says {dtype[0]}; write {not half}")


def _required(draft: _Draft) -> None:
    """Report required keys that are missing."""
    for key in ("rollout.model.model_path", "data.train_data_paths", "data.val_data_paths"):
        if draft.given.get(key) is None and not (draft.is_evaluation and key == "data.train_data_paths"):
            draft.problems.append(UserError(f"{key} has no value: give the path.", code="missing", key=key))
    if draft.is_evaluation and "task.train_path" not in draft.settings and "task.eval_path" in draft.settings:
        draft.settings["task.train_path"] = draft.settings["task.eval_path"]


def _placement(draft: _Draft) -> None:
    """Place groups on devices: groups with the same placement are colocated. RLinf's rank 0 is our rank 0."""
    nodes = draft.given.get("cluster.num_nodes", 1)
    named: dict[Any, Any] = draft.given.get(PLACEMENT) or {}
    if not isinstance(nodes, int) or nodes < 1:
        return draft.refuse("cluster.num_nodes", "write a number of machines")
    if not isinstance(named, dict):
        return draft.refuse(PLACEMENT, 'write groups and their devices, such as {"actor,rollout,reward": all}')
    places: dict[str, str] = {}
    for names, place in named.items():
        whole = f"0-{nodes * DEVICES_PER_NODE - 1}"
        places |= {name.strip(): whole if place == "all" else str(place) for name in str(names).split(",")}
        if ":" in str(place):
            return draft.refuse(
                PLACEMENT, 'each process has one device of its own; write device ranks only, such as "0-3"'
            )
    if draft.is_evaluation and "rollout" in places:
        places |= dict.fromkeys(_PLACED, places["rollout"])
    if places.get("actor") is not None and places.get("actor") == places.get("rollout"):
        places.setdefault("inference", places["actor"])
    unknown = sorted(set(places) - {*_PLACED, *_UNPLACED})
    if unknown:
        return draft.refuse(PLACEMENT, f"{unknown[0]} is not a group; the groups are {', '.join(_PLACED)} and reward")
    missing = [name for name in _PLACED if name not in places]
    if missing:
        return draft.refuse(PLACEMENT, f"it gives no devices to {' and '.join(missing)}; name them")
    shared = len({places[name] for name in _PLACED}) == 1
    draft.put("cluster.nodes", nodes, "cluster.num_nodes")
    draft.put("cluster.placement", {name: places[name] for name in _PLACED}, PLACEMENT)
    draft.put("cluster.mode", "colocated" if shared else "disaggregated", PLACEMENT)
    draft.put("trainer.schedule.kind", "sequential" if shared else "pipelined", PLACEMENT)
    if nodes > 1 or "all" in named.values():
        draft.put("cluster.devices_per_node", DEVICES_PER_NODE, PLACEMENT)
    if nodes > 1:
        # Colocated groups cannot broadcast over NCCL.
        draft.put("cluster.sync_mode", "disk" if shared else "broadcast", "cluster.num_nodes")
    if shared:
        for key in OFFLOADS:
            if draft.given.get(key, True) is not True:
                draft.refuse(key, "colocated groups always offload; write True")
    return None


def _lengths(draft: _Draft) -> None:
    """Set the token budget of micro-batches."""
    key = "runner.max_tokens_per_mbs"
    draft.put("actor.micro_batch_tokens", draft.given.get(key), key)
    own = f"{key}_inference"
    scored = own if draft.given.get(own) is not None else key
    draft.put("inference.micro_batch_tokens", draft.given.get(scored), scored)


def _steps(draft: _Draft) -> None:
    """Set the number of steps and the warm-up share; no-op for an evaluation."""
    if draft.is_evaluation:
        return None
    limit, epochs = draft.given.get("runner.max_steps", -1), draft.given.get("runner.max_epochs")
    bounds = [limit] if isinstance(limit, int) and limit >= 0 else []
    batch = draft.given.get("data.rollout_batch_size")
    data = draft.settings.get("task.train_path", ("", ""))[0]
    if epochs is None and not bounds:
        return draft.refuse("runner.max_steps", "give a number of steps, or runner.max_epochs")
    rows = _rows(Path(data))
    if epochs is not None and rows is not None and isinstance(batch, int) and batch > 0:
        bounds.append(epochs * (rows // batch))
        if not bounds[-1]:
            return draft.refuse("data.rollout_batch_size", f"{data} has {rows} rows; write {rows} or less")
    steps = min(bounds, default=None)  # None if the data file is missing; a later check reports that.
    draft.put("trainer.steps", steps, "runner.max_steps")
    return _warm_up(draft, steps)


def _warm_up(draft: _Draft, steps: int | None) -> None:
    """Convert the warm-up share of RLinf, a share of `lr_decay_iters`, to a share of the run's optimiser steps."""
    fraction = draft.given.get("actor.lr_sched.lr_warmup_fraction") or 0.0
    key = "actor.lr_sched.lr_decay_iters"
    spread = draft.given.get(key)
    total = None if steps is None else steps * draft.given.get("algorithm.n_minibatches", 1)
    if spread is not None and total:
        if draft.given.get("actor.lr_sched.lr_decay_style", "constant") != "constant" and spread != total:
            return draft.refuse(key, f"the learning rate falls over the {total} optimiser steps of the run; write null")
        fraction *= spread / total
        if fraction > 1:
            return draft.refuse(
                key,
                f"the learning rate would still rise when the run ends, after {total} optimiser steps; write null to use "
                "that number",
            )
    draft.put("actor.optimizer.warmup_fraction", fraction, "actor.lr_sched.lr_warmup_fraction")
    return None


def _clip(draft: _Draft) -> None:
    both = "algorithm.ratio_clip_eps"
    for ours, own in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        key = f"algorithm.{own}" if draft.given.get(f"algorithm.{own}") is not None else both
        draft.put(f"algorithm.policy_loss.{ours}", draft.given.get(key), key)


def _sampling(draft: _Draft) -> None:
    """Set sampling: rollouts are always sampled, an evaluation may be greedy."""
    key, prefix = "do_sample", "algorithm.sampling_params."
    drawn = draft.given.get(prefix + key, True)
    temperature = draft.given.get(prefix + "temperature", 1.0)
    if draft.is_evaluation:
        draft.put("eval.temperature", float(temperature) if drawn else 0.0, prefix + key)
    elif not drawn:
        draft.refuse(prefix + key, "rollouts are always sampled; write True")
    draft.put("rollout.sampling.temperature", temperature, prefix + "temperature")


def _engine(draft: _Draft) -> None:
    """Check CUDA graphs: they must cover every batch size that the engine decodes."""
    key = "rollout.cuda_graph_max_bs"
    recorded, running = draft.given.get(key), draft.given.get("rollout.max_running_requests")
    if recorded is not None and running is not None and recorded < running:
        draft.refuse(key, f"write rollout.max_running_requests={running} or more")


def _rows(file: Path) -> int | None:
    """Return the number of questions in a file; None if the file is missing."""
    if not file.is_file():
        return None
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1_000_000).split("\n...")[0].strip()
