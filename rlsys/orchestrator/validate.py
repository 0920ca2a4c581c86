"""Checks a config before a run starts and reports every problem at once, one sentence each.

Reads environment variables, and files that the config names. This module does not import Ray, Megatron or SGLang.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlsys.cluster.planning.memory import state_bytes
from rlsys.cluster.planning.placement import (
    context_problems,
    engine_problems,
    ipc_problems,
    machine_problems,
    memory_problems,
    overlaps,
    parallel_problems,
    parse_placement,
    search_node_problems,
    way_across,
)
from rlsys.cluster.planning.resolve import make_plan
from rlsys.components import check_callable
from rlsys.config.algorithm import Credit, OldLogprobs, ReturnsAdvantage, RouterReplay, TeacherApi
from rlsys.config.bounds import out_of_range
from rlsys.config.derived import (
    asks_teacher,
    chosen_layers,
    full_kl,
    has_critic,
    heldout_files,
    kl_topk_tokens,
    longest_group_s,
    max_staleness,
    max_wait,
    megatron_groups,
    needs_server,
    of_teacher,
    on_update,
    source_key,
    stage_limits,
    sums_over_vocabulary,
    task_of,
    train_files,
)
from rlsys.config.problems import algorithm_problems, conflict, refused, token_of
from rlsys.config.schema import (
    ActorConfig,
    AdamwConfig,
    BranchCredit,
    CassetteMode,
    CriticConfig,
    Device,
    GatewayAgent,
    Layers,
    LoraSync,
    Mode,
    MuonConfig,
    OnUpdate,
    RunConfig,
    SearchConfig,
    SearchR1Agent,
    SourceConfig,
    SyncMode,
    TaskConfig,
    TokenMode,
    free_maps,
    schema_keys,
)
from rlsys.errors import UserError, first_line, in_one
from rlsys.observe.trackers import OwnMetrics
from rlsys.orchestrator.pipeline.schedule_policy import make_policy
from rlsys.orchestrator.rewards.reward import check_source_terms, check_terms, check_weights
from rlsys.rollout.agent.episode import agent_of
from rlsys.rollout.tools.interface import check_tools
from rlsys.search.address import is_url
from rlsys.search.index.backend import check_kind
from rlsys.weights.lora import adapter_rules
from rlsys.weights.weight_map import Architecture, largest_tensor_bytes, layer_spec_of, read_architecture

Ranks = dict[str, tuple[int, ...]]


def validate(config: RunConfig, ignored: tuple[str, ...] = ()) -> None:
    """Raise UserError with one line per problem, and with the code and key of the first problem.

    Problems whose key starts with one of `ignored` are skipped.
    """
    problems = [problem for problem in find_problems(config) if not problem.key.startswith(ignored)]
    if problems:
        raise in_one(problems)


def find_problems(config: RunConfig) -> Iterator[UserError]:
    """Yield every problem of `config`. Memory is checked only if all else is sound."""
    sound = True
    for problem in _all_but_memory(config):
        sound = False
        yield problem
    if sound:
        yield from memory_problems(config, make_plan(config))


def _all_but_memory(config: RunConfig) -> Iterator[UserError]:
    for key, sentence in out_of_range(config):
        yield UserError(sentence, code="out_of_range", key=key)
    yield from _schedule(config)
    yield from _batches(config)
    yield from _contradictions(config)
    yield from (UserError(sentence, code="conflict", key="algorithm") for sentence in algorithm_problems(config))
    yield from check_terms(config.reward, config.task)
    yield from check_source_terms(config.reward, config.task)
    if config.algorithm.teacher.model is None:
        yield from check_weights(config.reward, config.task)
    yield from _tools(config)
    yield from _sources(config)
    yield from _tracking(config)
    yield from _checkpoints(config)
    yield from _sync(config)
    yield from _paths(config)
    yield from _search(config)
    yield from search_node_problems(config)
    yield from _layout(config)


def _layout(config: RunConfig) -> Iterator[UserError]:
    """Yield problems of placement and model; stops at a placement or model that cannot be read."""
    try:
        ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    except UserError as problem:
        yield problem
        return
    yield from _placement(config, ranks)
    yield from machine_problems(config, ranks)
    try:
        if config.model.family is not None:
            layer_spec_of(config.model.family)
    except UserError as problem:
        yield UserError(str(problem), code=problem.code, key="model.family")
        return
    try:
        architecture = read_architecture(config.model.path, config.model.family)
    except UserError as problem:
        yield UserError(f"model.path={config.model.path}: {problem}", code=problem.code, key="model.path")
        return
    yield from _sinks(config, architecture)
    if config.model.lora.rank > 0:
        yield from refused(lambda: adapter_rules(architecture, config.model.lora))
    elif config.model.lora.sync is LoraSync.adapters:
        yield conflict(
            "model.lora.sync=adapters sends adapters alone, but with model.lora.rank=0 the whole model is trained: set "
            "the rank, or sync=merged."
        )
    yield from _routing(config, architecture)
    for group, settings in megatron_groups(config).items():
        yield from parallel_problems(group, settings.parallel, len(ranks[group]), architecture)
        yield from context_problems(config, group, architecture)
    yield from _teacher(config, ranks, architecture)
    yield from engine_problems(config, len(ranks["rollout"]), architecture)
    picks = kl_topk_tokens(config.algorithm)
    if picks is not None and picks > architecture.vocab:
        yield UserError(
            f"algorithm.kl_estimator.topk_tokens={picks} is above the model's {architecture.vocab} tokens: lower it, or set it to null for "
            "the whole vocabulary.",
            code="mismatch",
            key="algorithm.kl_estimator.topk_tokens",
        )
    largest = largest_tensor_bytes(architecture, config.model.dtype)
    if config.cluster.sync_bucket_bytes < largest:
        yield UserError(
            f"cluster.sync_bucket_bytes={config.cluster.sync_bucket_bytes} is below the {largest} bytes of the model's "
            f"largest tensor: raise it to at least {largest}.",
            code="mismatch",
            key="cluster.sync_bucket_bytes",
        )


def _routing(config: RunConfig, policy: Architecture) -> Iterator[UserError]:
    """Yield why the routing of `policy` cannot be replayed, if the run would replay it."""
    key, name = "algorithm.router_replay", f"model.path={config.model.path}"
    if config.algorithm.router_replay is not RouterReplay.r3:
        return
    if not policy.experts:
        yield UserError(
            f"{key}=r3 replays the choice of experts, and {name} is a dense model: set it to none.",
            code="mismatch",
            key=key,
        )
    elif policy.dense_layers or policy.shared_experts:
        yield UserError(
            f"{key}=r3 is not supported for models with shared experts or a few dense layers, as {name} has: set it to none.",
            code="unsupported",
            key=key,
        )


def _teacher(config: RunConfig, ranks: Ranks, policy: Architecture) -> Iterator[UserError]:
    """Yield problems of a teacher's folder or address; `policy` is the policy's architecture."""
    key = "algorithm.teacher.model"
    if asks_teacher(config.algorithm):
        yield from _teacher_server(config)
    taught = of_teacher(config)
    if taught is None:
        return
    path = taught.model.path
    try:
        teacher = read_architecture(path, taught.model.family)
        differs = tokens_differ(config.model.path, path)
    except UserError as problem:
        yield UserError(f"{key}={path}: {problem}", code=problem.code, key=key)
        return
    yield from _sinks(config, teacher)
    groups = megatron_groups(taught)
    for group in ("inference", *(["actor"] if sums_over_vocabulary(config.algorithm) else [])):
        own = {*map(str, parallel_problems(group, megatron_groups(config)[group].parallel, len(ranks[group]), policy))}
        for one in parallel_problems(group, groups[group].parallel, len(ranks[group]), teacher):
            if str(one) not in own:
                sentence = str(one).replace(f"{group}.parallel.pp_layers", "algorithm.teacher.pp_layers")
                yield UserError(f"{key}={path}: {sentence}", code=one.code, key=key)
    if differs is not None:
        fix = "give a teacher with the policy's tokenizer"
        yield UserError(
            f"{key}={path} has other tokens than model.path={config.model.path}: {differs}; {fix}.",
            code="mismatch",
            key=key,
        )
    if config.task.max_total_tokens > teacher.max_positions:
        sentence = (
            f"{key}={path} reads at most {teacher.max_positions} tokens, below task.max_total_tokens="
            f"{config.task.max_total_tokens}: lower that, or choose another teacher."
        )
        yield UserError(sentence, code="mismatch", key=key)
    full = full_kl(config.algorithm)
    if teacher.vocab < policy.vocab or (full is not None and teacher.vocab != policy.vocab):
        want = f"{policy.vocab}" if full is not None else f"at least {policy.vocab}"
        sentence = (
            f"{key}={path} has {teacher.vocab} logits, and the policy's tokens with algorithm.kl_estimator.kind="
            f"{config.algorithm.kl_estimator.kind} need {want}: choose another teacher or estimator."
        )
        yield UserError(sentence, code="mismatch", key=key)


def _sinks(config: RunConfig, model: Architecture) -> Iterator[UserError]:
    """Yield a problem of a model with attention sinks, which only local layers have."""
    if model.sinks and chosen_layers(config) is Layers.te:
        yield UserError(
            f"model.layers={config.model.layers} means Transformer Engine's layers, whose attention sinks have not been "
            f"tried, and {model.family} has them: set it to local.",
            code="unsupported",
            key="model.layers",
        )


def _teacher_server(config: RunConfig) -> Iterator[UserError]:
    """Yield problems of a teacher behind an address."""
    key, settings = "algorithm.teacher", config.algorithm.teacher
    if not is_url(settings.model or ""):
        sentence = f"{key}.model={settings.model} is not an address: write it like http://127.0.0.1:30000."
        yield UserError(sentence, code="malformed", key=f"{key}.model")
    if settings.api is TeacherApi.openai and not settings.served_model.strip():
        sentence = f"{key}.served_model is empty, and {key}.api=openai names the model in requests: give its name."
        yield UserError(sentence, code="missing", key=f"{key}.served_model")
    yield from refused(lambda: token_of(f"{key}.token_env", settings.token_env))


def tokens_differ(policy: str, teacher: str) -> str | None:
    """Return the first difference between the tokens of two model folders, in words; None if they are the same.

    Only ids and tokens count, because the teacher reads ids and no text. Raises UserError if a folder has no
    tokenizer.json.
    """
    if Path(policy).resolve() == Path(teacher).resolve():
        return None
    ours, theirs = _tokens(policy), _tokens(teacher)
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            return f"token {number} is {theirs.get(number)!r} instead of {ours.get(number)!r}"
    return None


def _tokens(folder: str) -> dict[int, str]:
    """Return the tokens of a model folder by id. Raises UserError if its tokenizer.json cannot be read."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    try:
        return {
            number: token for token, number in Tokenizer.from_str(file.read_text(encoding="utf-8")).get_vocab().items()
        }
    except OSError as problem:
        raise UserError(
            f"{file} cannot be read ({problem.strerror}), and the tokens of policy and teacher are compared: copy the "
            "model's tokenizer there.",
            code="not_found",
            key=str(file),
        ) from problem
    except Exception as problem:  # The package `tokenizers` raises no other class.
        raise UserError(
            f"{file} is no tokenizer ({first_line(problem)}): copy it again.",
            code="malformed",
            key=str(file),
        ) from problem


def _batches(config: RunConfig) -> Iterator[UserError]:
    trainer, task = config.trainer, config.task
    if trainer.mini_batches > trainer.prompts_per_step >= 1:
        yield conflict(
            f"trainer.mini_batches={trainer.mini_batches} is above trainer.prompts_per_step={trainer.prompts_per_step}, "
            f"and each mini-batch needs a question: lower it to at most {trainer.prompts_per_step}."
        )
    yield from _room(task, "task.max_total_tokens")
    for group, settings in megatron_groups(config).items():
        budget = settings.micro_batch_tokens
        if budget < task.max_total_tokens:
            yield conflict(
                f"{group}.micro_batch_tokens={budget} cannot hold one episode of task.max_total_tokens="
                f"{task.max_total_tokens}: raise it to at least {task.max_total_tokens}."
            )


def _room(task: TaskConfig, key: str) -> Iterator[UserError]:
    """Yield a problem if an episode has no room for a turn; `key` is the key of its length."""
    if task.max_prompt_tokens + task.max_turn_tokens > task.max_total_tokens:
        yield conflict(
            f"{key}={task.max_total_tokens} has no room for max_prompt_tokens={task.max_prompt_tokens} and one turn of "
            f"max_turn_tokens={task.max_turn_tokens}: raise it."
        )


def _contradictions(config: RunConfig) -> Iterator[UserError]:
    algorithm = config.algorithm
    if algorithm.old_logprobs is OldLogprobs.engine and config.task.token_mode is TokenMode.retokenize:
        yield conflict(
            "algorithm.old_logprobs=engine contradicts task.token_mode=retokenize: re-tokenised text has "
            "no sampled log-probs; set it to recompute, or use task.token_mode=append."
        )
    if algorithm.old_logprobs is OldLogprobs.engine and config.task.train_eos:
        yield conflict(
            "algorithm.old_logprobs=engine contradicts task.train_eos=true: the end-of-sequence token is "
            "appended, not sampled, and has no log-prob; change one of them."
        )
    asked, sampled = config.eval, config.compat.sampled_validation
    if sampled and asked.temperature:
        yield conflict(
            f"eval.temperature={asked.temperature:g} contradicts compat.sampled_validation=true, which samples answers "
            "like rollouts: set eval.temperature=0, or compat.sampled_validation=false."
        )
    if asked.samples > 1 and not asked.temperature and not sampled:
        yield conflict(
            f"eval.samples={asked.samples} greedy answers would all be the same: set eval.temperature above 0, such as "
            "1, or eval.samples=1."
        )
    yield from _optimizers(config)
    tags = config.task.tags
    words = (tags.search, tags.answer, tags.information)
    if not all(words) or len({*words, "think"}) <= len(words):
        yield conflict(
            f"task.tags search={tags.search}, answer={tags.answer}, information={tags.information} must be three "
            "different words, none of them think: rename one."
        )


def _optimizers(config: RunConfig) -> Iterator[UserError]:
    learners: dict[str, ActorConfig | CriticConfig] = {"actor": config.actor, "critic": config.critic}
    for name in ("actor", "critic") if has_critic(config.algorithm) else ("actor",):
        optimizer, key = learners[name].optimizer, f"{name}.optimizer"
        if optimizer.min_lr > optimizer.lr:
            yield conflict(f"{key}.min_lr={optimizer.min_lr} is above {key}.lr={optimizer.lr}: lower it.")
        if isinstance(optimizer, AdamwConfig):
            if optimizer.overlap_param_gather and not (optimizer.distributed and optimizer.overlap_grad_reduce):
                yield conflict(
                    f"{key}.overlap_param_gather=true needs {key}.distributed=true and {key}.overlap_grad_reduce=true: "
                    "set both, or leave it out."
                )
            continue
        if isinstance(optimizer, MuonConfig) and name == "actor" and config.model.lora.rank:
            yield conflict(
                f"{key}.kind=muon orthogonalises the updates of whole matrices, but with model.lora.rank="
                f"{config.model.lora.rank} the actor trains only factors of them: set it to adamw, or the rank to 0."
            )
        yield from refused(partial(state_bytes, optimizer))


def _paths(config: RunConfig) -> Iterator[UserError]:
    for _, key, path in (*train_files(config.task), *heldout_files(config.task)):
        if not Path(path).is_file():
            yield UserError(
                f"{key}={path} does not exist: prepare the data first, or give the path of a jsonl or parquet file.",
                code="not_found",
                key=key,
            )
    cassette = config.search.cassette
    if cassette.path is None:
        if cassette.mode is not CassetteMode.replay:
            yield UserError(
                f"search.cassette.mode={cassette.mode} needs a file: give search.cassette.path.",
                code="missing",
                key="search.cassette.mode",
            )
    elif cassette.mode is CassetteMode.replay and not Path(cassette.path).is_file():
        yield UserError(
            f"search.cassette.path={cassette.path} does not exist: record it with search.cassette.mode=record.",
            code="not_found",
            key="search.cassette.path",
        )
    elif cassette.mode is CassetteMode.record and Path(cassette.path).exists():
        yield UserError(
            f"search.cassette.mode=record needs a new file, but search.cassette.path={cassette.path} exists: delete "
            "it, or use search.cassette.mode=extend.",
            code="exists",
            key="search.cassette.mode",
        )


def _tools(config: RunConfig) -> Iterator[UserError]:
    task, search = config.task, config.search
    yield from refused(lambda: agent_of(task))
    yield from check_tools(task)
    if isinstance(task.agent, GatewayAgent):
        yield from _branches(config, task.agent)
    without = [] if search.enabled else ["search.enabled"]
    without += [source_key(name, "search") for name, source in task.sources.items() if source.search is False]
    message = task.agent.invalid_message if isinstance(task.agent, SearchR1Agent) else ""
    if without and f"<{task.tags.search}>" in message:
        yield conflict(
            f"task.agent.invalid_message mentions <{task.tags.search}>, but {without[0]}=false: name the actions that the "
            "policy has instead, such as its tools and the answer."
        )
    if not search.enabled and search.cassette.path is not None:
        yield conflict(
            f"search.cassette.path={search.cassette.path} contradicts search.enabled=false: enable search, or set "
            "search.cassette.path=null."
        )
    if any(tool.kind == "pages" for tool in task.tools):
        yield from _pages(search, "task.tools")
    if search.pages is not None and not config.cluster.search.nodes and not Path(search.pages).is_file():
        sentence = f"search.pages={search.pages} does not exist: give a jsonl file of {{url, contents}}, or null."
        yield UserError(sentence, code="not_found", key="search.pages")


def _pages(search: SearchConfig, tools: str) -> Iterator[UserError]:
    """Yield what is missing for the tools that open pages, which the key `tools` has."""
    wrong = "search.enabled=false" if not search.enabled else f"search.cassette.path={search.cassette.path}"
    if not search.enabled or search.cassette.path is not None:
        sentence = f"{tools} has kind=pages, whose pages come from a search server, but {wrong}: change either."
        yield UserError(sentence, code="conflict", key=tools)
    elif search.url is None and search.pages is None:
        sentence = f"search.pages is null, and {tools} has kind=pages: give a jsonl file of {{url, contents}}."
        yield UserError(sentence, code="missing", key="search.pages")


def _sources(config: RunConfig) -> Iterator[UserError]:
    task, curriculum = config.task, config.task.curriculum
    for key, path in (("task.train_path", task.train_path), ("task.eval_path", task.eval_path)):
        if task.sources and path is not None:
            yield conflict(f"{key}={path} contradicts task.sources, which have their own files: set it to null.")
        elif not task.sources and path is None:
            yield UserError(
                f"{key} is null: give the path of a jsonl or parquet file, or task.sources.", code="missing", key=key
            )
    if task.sources and not heldout_files(task):
        sentence = "task.sources has no held-out questions: give at least one source an eval_path."
        yield UserError(sentence, code="missing", key="task.sources")
    for name, source in task.sources.items():
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            sentence = f"task.sources has a source named {name!r}: use letters, digits and underscores, a letter first."
            yield UserError(sentence, code="malformed", key="task.sources")
        yield from _source(config, name, source)
    easy, hard = curriculum.easy_threshold, curriculum.hard_threshold
    if (easy is not None or hard is not None) and len(task.sources) < 2:
        yield conflict(
            "task.curriculum changes the weights of sources among each other, and task.sources has fewer than two: add "
            "sources, or set both thresholds to null."
        )
    if easy is not None and hard is not None and hard >= easy:
        yield conflict(
            f"task.curriculum.hard_threshold={hard:g} must be below task.curriculum.easy_threshold={easy:g}: lower it."
        )


def _source(config: RunConfig, name: str, source: SourceConfig) -> Iterator[UserError]:
    """Yield the problems of what a source has in place of the task's settings."""
    task, own = config.task, task_of(config.task, name)
    tools, search = source_key(name, "tools"), source_key(name, "search")
    for limit in ("max_turns", "max_turn_tokens", "max_total_tokens"):
        key, most, given = source_key(name, limit), getattr(task, limit), getattr(own, limit)
        if given > most:
            sentence = f"{key}={given} is above task.{limit}={most}, the most of any source: lower it, or raise that."
            yield UserError(sentence, code="out_of_range", key=key)
    if own != task:
        yield from _room(own, source_key(name, "max_total_tokens"))
    if source.tools is not None:
        for problem in check_tools(own):
            yield UserError(str(problem).replace("task.tools", tools, 1), code=problem.code, key=tools)
    if source.search and not config.search.enabled:
        yield conflict(f"{search}=true contradicts search.enabled=false: set it to null, or enable search.")
    if not any(tool.kind == "pages" for tool in own.tools):
        return
    if source.tools is not None:
        yield from _pages(config.search, tools)
    if source.search is False:
        yield conflict(f"{search}=false contradicts kind=pages, whose pages the search finds: give {tools} without it.")


def _branches(config: RunConfig, agent: GatewayAgent) -> Iterator[UserError]:
    """Yield the settings that need one context an episode, which an agent behind the gateway may not have."""
    needing = {
        "a critic, whose values follow one context": has_critic(config.algorithm),
        "compat.observations_in_values=true": config.compat.observations_in_values,
    }
    for setting in (name for name, given in needing.items() if given):
        sentence = (
            f"task.agent.kind=gateway cannot have {setting}: choose another algorithm.advantage or compat, or agent."
        )
        yield conflict(sentence)
    advantage = config.algorithm.advantage
    whole = isinstance(advantage, ReturnsAdvantage) and advantage.credit is Credit.trajectory
    if agent.credit is BranchCredit.branch and not whole:
        sentence = (
            "task.agent.credit=branch gives all tokens of a branch its reward, which contradicts algorithm.advantage: use "
            "algorithm.advantage=returns with algorithm.advantage.credit=trajectory, or task.agent.credit=episode."
        )
        yield conflict(sentence)


def _search(config: RunConfig) -> Iterator[UserError]:
    search = config.search
    # With cluster.search.nodes, the index is on those machines, not here.
    if search.url is None and needs_server(search) and not config.cluster.search.nodes:
        index = search.index
        if index is None:
            yield UserError(
                "search.url and search.index are both null: give a running server or an index folder.",
                code="missing",
                key="search.url",
            )
        elif not (Path(index) / "manifest.json").is_file():
            yield UserError(
                f"search.index={index} is not an index: make one with `rlsys search index`, or "
                "give search.url of a running server.",
                code="not_found",
                key="search.index",
            )
        else:
            key = "search.index" if search.index_kind is None else "search.index_kind"
            yield from refused(lambda: check_kind(index, search.index_kind), key)
    if search.replicas and search.url is None:
        yield conflict(f"search.replicas={list(search.replicas)} needs a first server: give its address as search.url.")
    if search.hedge_after_s is not None and not search.replicas:
        yield conflict(
            f"search.hedge_after_s={search.hedge_after_s:g} needs a second server: give search.replicas, or set it to "
            "null."
        )
    elif search.hedge_after_s is not None and search.hedge_after_s >= search.timeout_s:
        yield conflict(
            f"search.hedge_after_s={search.hedge_after_s:g} must be below search.timeout_s={search.timeout_s:g}: lower "
            "it, or set it to null."
        )
    for key, url in (("search.url", search.url), *(("search.replicas", url) for url in search.replicas)):
        if url is not None and not is_url(url):
            yield UserError(
                f"{key}={url} is not an address: write it like http://127.0.0.1:8000.", code="malformed", key=key
            )
    twice = [url for url, times in Counter([search.url, *search.replicas]).items() if times > 1]
    if twice:
        yield conflict(
            f"search.replicas={list(search.replicas)} names {twice[0]} twice, or repeats search.url: name every server "
            "once."
        )
    yield from refused(lambda: token_of("search.token_env", search.token_env))


def _tracking(config: RunConfig) -> Iterator[UserError]:
    yield from refused(lambda: OwnMetrics(config.tracking.metrics))
    for own in config.tracking.trackers:
        for name, arguments in (("log", ("self", "step", "metrics")), ("close", ("self",))):
            method = getattr(own.component, name, None)
            yield from refused(partial(check_callable, method, f"{own.kind}.{name}", own.key, arguments))


def _checkpoints(config: RunConfig) -> Iterator[UserError]:
    settings = config.checkpoint
    if settings.keep_last is None and (settings.keep_best or settings.keep_every is not None):
        yield UserError(
            "checkpoint.keep_best and checkpoint.keep_every have no effect without checkpoint.keep_last, because all "
            "checkpoints stay: set checkpoint.keep_last, or leave them out.",
            code="conflict",
            key="checkpoint.keep_last",
        )
    known, maps = {*schema_keys()}, tuple(f"{key}." for key in free_maps())
    unknown = [key for key in settings.may_differ if key not in known and not key.startswith(maps)]
    if unknown:
        yield UserError(
            f"checkpoint.may_differ names {unknown[0]}, which is not a key: see docs/configuration.md.",
            code="unknown",
            key="checkpoint.may_differ",
        )


def _schedule(config: RunConfig) -> Iterator[UserError]:
    try:
        staleness, wait = max_staleness(config), max_wait(config)
        on_update(config)
        make_policy(config)
    except UserError as problem:
        yield problem
        return
    if wait is not None and wait >= staleness:
        yield conflict(
            f"trainer.schedule.max_wait={wait} has no effect, because trainer.schedule.max_staleness={staleness} bounds "
            "the wait too: lower max_wait, or set trainer.schedule.kind=async."
        )


def _sync(config: RunConfig) -> Iterator[UserError]:
    cluster, schedule = config.cluster, config.trainer.schedule
    waits = hasattr(schedule, "on_update") and on_update(config) is OnUpdate.finish
    if cluster.mode is Mode.colocated and schedule.kind != "sequential":
        yield conflict(
            f"trainer.schedule.kind={schedule.kind} overlaps stages, but cluster.mode=colocated runs one stage at "
            "a time on shared devices: set trainer.schedule.kind=sequential, or place the groups apart."
        )
    yield from ipc_problems(config)
    if waits and cluster.call_timeout_s <= longest_group_s(config):
        yield conflict(f"cluster.call_timeout_s={cluster.call_timeout_s:g} {_too_short_for_groups(config)}")
    yield from _stage_limits(config, waits)
    if cluster.sync_mode is SyncMode.broadcast and cluster.mode is Mode.colocated and cluster.device is Device.gpu:
        yield conflict(
            "cluster.sync_mode=broadcast with cluster.mode=colocated puts two members of an NCCL group on one GPU, "
            f"which NCCL refuses: use {'cluster.sync_mode=tensor' if cluster.nodes == 1 else way_across(config)}."
        )


def _stage_limits(config: RunConfig, waits: bool) -> Iterator[UserError]:
    """Yield problems of `cluster.stage_timeout_s`; `waits` is True if the activation of weights waits for episodes."""
    cluster = config.cluster
    for stage, limit_s in stage_limits(cluster).items():
        key = f"cluster.stage_timeout_s.{stage}"
        if limit_s > cluster.call_timeout_s:
            yield conflict(
                f"{key}={limit_s:g} must not be above cluster.call_timeout_s={cluster.call_timeout_s:g}, after which the "
                "collectives of the workers time out: lower it, or raise call_timeout_s."
            )
        elif stage == "sync" and waits and limit_s <= longest_group_s(config):
            yield conflict(f"{key}={limit_s:g} {_too_short_for_groups(config)}")


def _too_short_for_groups(config: RunConfig) -> str:
    limit_s, longest_s = config.rollout.episode_timeout_s, longest_group_s(config)
    bound = f"rollout.episode_timeout_s={limit_s:g}"
    if longest_s > limit_s:
        bound = f"{longest_s:g}, which is {bound} for each of {longest_s / limit_s:.0f} rounds of a group's episodes"
    return (
        f"must be above {bound}, because with trainer.schedule.on_update=finish the activation of weights waits for "
        "episodes: raise it, or use on_update=continue."
    )


def _placement(config: RunConfig, ranks: Ranks) -> Iterator[UserError]:
    if config.cluster.mode is Mode.colocated:
        if len({frozenset(held) for held in ranks.values()}) > 1:
            listed = ", ".join(f'{group}="{place}"' for group, place in config.cluster.placement.items())
            yield conflict(
                f"cluster.mode=colocated needs all groups on the same ranks, but cluster.placement is {listed}: "
                "place them alike, or set cluster.mode=disaggregated."
            )
        return
    places = {"critic": config.cluster.placement["actor"], **config.cluster.placement}
    present = {*megatron_groups(config), "rollout"}
    for a, b, both in overlaps({group: held for group, held in ranks.items() if group in present}):
        yield conflict(
            f'cluster.placement.{a}="{places[a]}" and cluster.placement.{b}='
            f'"{places[b]}" share rank {both[0]}: give each group ranks of its own, or set '
            "cluster.mode=colocated and trainer.schedule.kind=sequential."
        )
