"""Shrinks the config of a big run to a few processes on one machine, without changing kinds of settings.

Contract of `miniature`, which is pure:
- Keys that select a kind come from the big config: kinds of parallelism, uneven stages, groups that share devices,
  schedule, adapters, uneven mini-batches, algorithm and critic, optimiser, packing, checkpoints.
- Keys that set a size come from the tiny config, a run on CPUs: model (of the same family), task, search server,
  batches, engines.
- Context, pipeline, tensor, expert and data parallelism of 2 and more become 2, or 1 if the Megatron groups would have
  more than `MOST_PROCESSES` processes together. Priorities: first, each of the first four kinds in some group, in this
  order; then other model parallelism of the actor, the critic and inference; then data parallelism.
- Groups that share devices still share them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import TypeVar

from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import ClusterConfig, Mode, OptimizerConfig, ParallelConfig, RunConfig, SyncMode

Optimizer = TypeVar("Optimizer", bound=OptimizerConfig)
MOST_PROCESSES = 8
"""Largest number of processes of all Megatron groups together."""
MOST_RANK = 8
"""Largest rank of adapters."""
MOST_EPISODES = 4
"""Largest number of episodes per question."""

_Ranks = Mapping[str, Sequence[int]]
_IMPORTANCE = ("actor", "critic", "inference")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Degrees of parallelism of a Megatron group."""

    cp: int
    pp: int
    tp: int
    dp: int

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.cp * self.pp * self.tp * self.dp

    def ep(self, wanted: int) -> int:
        """Degree of expert parallelism, limited by the ranks of a pipeline stage."""
        return min(wanted, 2, self.tp * self.cp * self.dp)


def miniature(config: RunConfig, tiny: RunConfig, layers: int) -> RunConfig:
    """Miniature of `config` with the sizes of `tiny`; `layers` is the even number of layers of the tiny model.

    Both configs must be valid. The tiny run's prompts must divide into two mini-batches but not into three, and its
    engines must have one slot each.
    """
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    cuts = _choose_cuts(config, ranks)
    parallel = {
        name: _parallel(settings.parallel, cuts[name], layers) for name, settings in megatron_groups(config).items()
    }
    apart = config.cluster.mode is Mode.disaggregated
    engines = min(2, len(ranks["rollout"]) // config.rollout.engine.tp) if apart else cuts["actor"].ranks
    sizes = {name: cut.ranks for name, cut in cuts.items()} | {"rollout": engines}
    small = replace(
        tiny,
        name=f"{config.name}_miniature",
        model=replace(
            tiny.model,
            recompute=config.model.recompute,
            lora=replace(config.model.lora, rank=min(config.model.lora.rank, MOST_RANK)),
        ),
        cluster=_cluster(config.cluster, tiny.cluster, ranks, sizes),
        actor=replace(
            tiny.actor,
            parallel=parallel["actor"],
            optimizer=_optimizer(config.actor.optimizer, tiny.actor.optimizer),
            packing=config.actor.packing,
        ),
        inference=replace(tiny.inference, parallel=parallel["inference"], packing=config.inference.packing),
        critic=replace(
            tiny.critic,
            parallel=parallel.get("critic", ParallelConfig()),
            optimizer=_optimizer(config.critic.optimizer, tiny.critic.optimizer),
            packing=config.critic.packing,
            value_clip=config.critic.value_clip,
            warmup_steps=min(config.critic.warmup_steps, 1),
        ),
        rollout=replace(tiny.rollout, sampling=config.rollout.sampling),
        task=replace(tiny.task, token_mode=config.task.token_mode, train_eos=config.task.train_eos),
        algorithm=_algorithm(config.algorithm),
        compat=replace(config.compat, validation_batch=None),
        trainer=replace(
            tiny.trainer,
            schedule=config.trainer.schedule,
            mini_batches=3 if _has_uneven_mini_batches(config) else min(config.trainer.mini_batches, 2),
        ),
        eval=replace(tiny.eval, engines=None if config.eval.engines is None else 1),
        checkpoint=replace(config.checkpoint, interval=min(config.checkpoint.interval, 1)),
    )
    return deepcopy(small)


def _has_uneven_mini_batches(config: RunConfig) -> bool:
    return config.trainer.prompts_per_step % config.trainer.mini_batches > 0


def _choose_cuts(config: RunConfig, ranks: _Ranks) -> dict[str, _Cut]:
    """Best cuts of the Megatron groups among all that fit, by the priorities given above."""
    groups = megatron_groups(config)
    wanted = {name: groups[name].parallel for name in _IMPORTANCE if name in groups}
    options = [list(_options(parallel, len(ranks[name]))) for name, parallel in wanted.items()]
    together = [[name for name in wanted if set(ranks[name]) == held] for held in map(set, ranks.values())]

    def fits(cuts: Mapping[str, _Cut]) -> bool:
        alike = all(len({cuts[name].ranks for name in names}) <= 1 for names in together)
        return alike and sum(cut.ranks for cut in cuts.values()) <= MOST_PROCESSES

    def worth(cuts: Mapping[str, _Cut]) -> list[int]:
        of_model = [(cut.cp, cut.pp, cut.tp, cut.ep(wanted[name].ep)) for name, cut in cuts.items()]
        somewhere = [max(degrees) for degrees in zip(*of_model, strict=True)]
        return [*somewhere, *chain.from_iterable(of_model), *(cut.dp for cut in cuts.values())]

    choices = (dict(zip(wanted, chosen, strict=True)) for chosen in product(*options))
    return max(filter(fits, choices), key=worth)


def _options(parallel: ParallelConfig, ranks: int) -> Iterator[_Cut]:
    """Yield the possible cuts of a group of `ranks` ranks, with degrees of at most 2."""
    dp = ranks // (parallel.tp * parallel.pp * parallel.cp)
    big = (parallel.cp, parallel.pp, parallel.tp, dp)
    for degrees in product(*(range(1, min(degree, 2) + 1) for degree in big)):
        yield _Cut(*degrees)


def _parallel(wanted: ParallelConfig, cut: _Cut, layers: int) -> ParallelConfig:
    uneven = wanted.pp_layers is not None and len(set(wanted.pp_layers)) > 1 and cut.pp > 1
    return ParallelConfig(
        cp=cut.cp,
        pp=cut.pp,
        tp=cut.tp,
        ep=cut.ep(wanted.ep),
        pp_layers=_stages(wanted.pp_layers or [], layers) if uneven else None,
        sequence_parallel=wanted.sequence_parallel and cut.tp > 1,
    )


def _stages(wanted: Sequence[int], layers: int) -> list[int]:
    """Layers of two uneven stages; the first has more if `wanted` has more on its first than last, else fewer."""
    fewer = layers // 2 - 1
    return [fewer, layers - fewer] if wanted[0] <= wanted[-1] else [layers - fewer, fewer]


def _cluster(wanted: ClusterConfig, tiny: ClusterConfig, ranks: _Ranks, sizes: Mapping[str, int]) -> ClusterConfig:
    """One machine of CPU slots; groups that share devices still share them, in the same order."""
    blocks: dict[frozenset[int], list[str]] = defaultdict(list)
    for name in sorted(ranks, key=lambda name: min(ranks[name])):
        blocks[frozenset(ranks[name])].append(name)
    places: dict[str, str] = {}
    first = 0
    for names in blocks.values():
        size = sizes[names[0]]
        places |= dict.fromkeys(names, f"{first}-{first + size - 1}")
        first += size
    return replace(
        tiny,
        mode=wanted.mode,
        placement={name: places[name] for name in wanted.placement},
        sync_mode=SyncMode.tensor if wanted.sync_mode is SyncMode.ipc else wanted.sync_mode,
    )


def _optimizer(wanted: Optimizer, tiny: OptimizerConfig) -> Optimizer:
    """The optimiser of the big run with the tiny run's learning rate."""
    return replace(wanted, lr=tiny.lr, min_lr=0.0)


def _algorithm(wanted: AlgorithmConfig) -> AlgorithmConfig:
    """The algorithm of the big run with small prompt groups, and with a reference that is updated at every step."""
    return replace(
        wanted,
        n_samples=min(wanted.n_samples, MOST_EPISODES),
        ref_policy_ema_update_period=1,
        ref_policy_reset_period=None if wanted.ref_policy_reset_period is None else 1,
    )
