"""Which key of RLinf is which of ours: a table. Pure data.

Four kinds of rules. `Moved`: the value goes on under our keys. `Only`: the key says what rlsys does in any case, and has
no other value. `Idle`: it names or speeds up a part of RLinf's own machinery that rlsys arranges itself; what is learned
does not depend on it. `Joint`: it counts together with other keys, in `rlsys.config.rlinf`.

The keys are those of RLinf's Search-R1 example (github.com/RLinf/RLinf, commits 779c3188b to a3816b59).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MANY_ANSWERS = 10
"""RLinf's reward of Search-R1 pays less for an episode with more answers; how much less is `reward.many_answers_score`."""
WHOLE_VOCABULARY = 1_000_000
"""RLinf's `top_k` for no limit; above the size of any vocabulary."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Moved:
    """The value goes on under `ours`."""

    ours: tuple[str, ...]
    convert: Callable[[Any], Any] = _same
    """RLinf's value -> ours; None leaves our default. Raises ValueError, with what to write instead, where there is none."""


@dataclass(frozen=True, slots=True)
class Only:
    """The value must be one of `values`."""

    values: tuple[Any, ...]
    instead: str
    """What to write, for somebody who gave another."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Any value will do."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Counts together with other keys."""


Rule = Moved | Only | Idle | Joint


def _one_of(choices: Mapping[Any, Any], instead: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value not in choices:
            raise ValueError(instead)
        return choices[value]

    return convert


def _to(*ours: str) -> Moved:
    return Moved(ours)


def _server(address: Any) -> str:
    """`host:port` as an address that a client can ask; a server on all interfaces is asked on this machine's own."""
    host, _, port = str(address).removeprefix("http://").rstrip("/").removesuffix("/retrieve").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("write HOST:PORT, such as 127.0.0.1:8000")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _one_path(paths: Any) -> str:
    listed = [paths] if isinstance(paths, str) else paths
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        raise ValueError("name one file; `rlsys data prepare merge` makes one of several")
    return listed[0]


def _trackers(names: Any) -> dict[str, bool]:
    given = set(names) if isinstance(names, list) else {names}
    if given - {"tensorboard", "wandb"}:
        raise ValueError("name tensorboard, wandb, both or none ([])")
    return {"tensorboard": "tensorboard" in given, "wandb": "wandb" in given}


def _interval(steps: Any) -> Any:
    return 0 if steps == -1 else steps


def _top_k(value: Any) -> Any:
    return -1 if value in (None, 0) or int(value) >= WHOLE_VOCABULARY else value


def _turns(generations: Any) -> int:
    """RLinf counts what is generated, with the answer; `task.max_turns` counts searches, after which one may answer."""
    if not isinstance(generations, int) or generations < 1:
        raise ValueError("write how often the model speaks, at least once")
    return generations - 1


_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "32": "float32",
}
_PRECISION = Moved(
    ("model.dtype", "rollout.engine.dtype"),
    _one_of(
        _DTYPES | {32: "float32"},
        "rlsys trains in bf16, which needs no loss scale, or in fp32; write bf16, with optim.fp16 False and optim.bf16 True",
    ),
)
_RECOMPUTE = _one_of(
    {"full": True, None: False, "none": False}, "rlsys recomputes whole layers or none: write full, or null"
)
_ESTIMATOR = _one_of(
    {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": "abs"},
    "as a loss low_var_kl, mse and abs can be learned from; write one of them, or give algorithm.kl_estimator=k3++ on the "
    "command line",
)
_MODEL = _to("model.path")
_LENGTH = _to("task.max_total_tokens")
_SEED = _to("trainer.seed")

CLUSTER_AND_RUNNER: dict[str, Rule] = {
    "cluster.num_nodes": Joint(),
    "cluster.component_placement": Joint(),
    "runner.task_type": Joint(),
    "runner.logger.log_path": Idle(),
    "runner.logger.project_name": _to("tracking.project"),
    "runner.logger.experiment_name": _to("name"),
    "runner.logger.logger_backends": Moved(("tracking",), _trackers),
    "runner.max_epochs": Joint(),
    "runner.max_steps": Joint(),
    "runner.val_check_interval": Moved(("eval.interval",), _interval),
    "runner.save_interval": Moved(("checkpoint.interval",), _interval),
    "runner.seq_length": _LENGTH,
    "runner.enable_dynamic_batch_size": Only(
        (True,), "rlsys always packs by tokens; write True and max_tokens_per_mbs"
    ),
    "runner.max_tokens_per_mbs": Joint(),
    "runner.max_tokens_per_mbs_inference": Joint(),
    "runner.resume_dir": _to("resume"),
    "runner.experiment_name": _to("name"),
    "runner.output_dir": _to("output_dir"),
}

ALGORITHM: dict[str, Rule] = {
    "algorithm.group_size": Joint(),
    "algorithm.n_minibatches": _to("trainer.mini_batches"),
    "algorithm.training_batch_size_per_gpu": Idle(),
    "algorithm.rollout_batch_size_per_gpu": Only(
        (None,),
        "an engine takes what it can hold; write null, and rollout.max_running_requests for its limit",
    ),
    "algorithm.logprob_forward_micro_batch_size": Idle(),
    "algorithm.val_rollout_batch_size_per_gpu": Idle(),
    "algorithm.recompute_logprobs": _to("algorithm.recompute_logprobs"),
    "algorithm.shuffle_rollout": Only((False,), "groups are trained in the order in which they end; write False"),
    "algorithm.loss_type": Only(("actor",), "write actor, and algorithm=ppo on the command line for a critic"),
    "algorithm.loss_agg_func": _to("algorithm.aggregation"),
    "algorithm.kl_beta": _to("algorithm.kl_coef"),
    "algorithm.kl_penalty_type": Moved(("algorithm.kl_estimator",), _ESTIMATOR),
    "algorithm.ratio_clip_eps": Joint(),
    "algorithm.clip_ratio_low": Joint(),
    "algorithm.clip_ratio_high": Joint(),
    "algorithm.clip_ratio_c": _to("algorithm.dual_clip"),
    "algorithm.entropy_bonus": _to("algorithm.entropy_coef"),
    "algorithm.calculate_entropy": Idle(),
    "algorithm.adv_type": Only(("grpo",), "write grpo, and algorithm=NAME on the command line for another"),
    "algorithm.normalize_advantages": Only(
        (False,), "write False, and algorithm.advantage_scale=whiten on the command line"
    ),
    "algorithm.early_stop_imp_ratio": Only(
        (None,),
        "rlsys leaves no micro-batch out; write null, with clip_ratio_c for a bound of the loss and guards.ratio_ceiling for "
        "a warning",
    ),
    "algorithm.use_valid_token_scale": Only((False,), "loss_agg_func says how tokens are weighed; write False"),
    "algorithm.sampling_params.do_sample": Joint(),
    "algorithm.sampling_params.temperature": Joint(),
    "algorithm.sampling_params.top_k": Moved(("rollout.sampling.top_k",), _top_k),
    "algorithm.sampling_params.top_p": _to("rollout.sampling.top_p"),
    "algorithm.sampling_params.repetition_penalty": Only((1.0,), "the loss scores what is sampled; write 1.0"),
    "algorithm.sampling_params.max_new_tokens": _to("task.max_turn_tokens"),
    "algorithm.sampling_params.min_new_tokens": Only((0, 1, None), "a turn may end with its first token; write 1"),
    "algorithm.sampling_params.stop": _to("rollout.sampling.stop"),
}

EPISODES: dict[str, Rule] = {
    "agentloop.group_name": Idle(),
    "agentloop.maxturn": Moved(("task.max_turns",), _turns),
    "agentloop.max_turns": Moved(("task.max_turns",), _turns),
    "agentloop.max_tool_response_length": _to("task.max_observation_tokens"),
    "agentloop.tool_response_truncate_side": Only(
        ("right",), "an observation is cut at its end, its closing tag kept; write right"
    ),
    "agentloop.toolcall_parser": Only(("searchr1-qwen",), "task.tags has the words of a call; write searchr1-qwen"),
    "agentloop.print_outputs": Only((False,), "samples/ in the run's folder has trajectories as text; write False"),
    "tools.search.server_addr": Moved(("search.url",), _server),
    "tools.search.topk": _to("search.topk"),
    "data.type": Only(("math",), "rows have a prompt and solutions; write math"),
    "data.max_prompt_length": _to("task.max_prompt_tokens"),
    "data.filter_prompt_by_length": Only((True,), "no prompt above max_prompt_length is asked; write True"),
    "data.rollout_batch_size": _to("trainer.prompts_per_step"),
    "data.val_rollout_batch_size": Idle(),
    "data.num_workers": Idle(),
    "data.prompt_key": Only(("prompt",), "rename the field of the rows to prompt"),
    "data.answer_key": Only(("solutions",), "rename the field of the rows to solutions"),
    "data.apply_chat_template": Idle(),
    "data.shuffle": Joint(),
    "data.validation_shuffle": Idle(),
    "data.seed": _SEED,
    "data.train_data_paths": Moved(("task.train_path",), _one_path),
    "data.val_data_paths": Moved(("task.eval_path",), _one_path),
    "data.data_size": Moved(("eval.limit",), lambda count: None if count == -1 else count),
    "reward.group_name": Idle(),
    "reward.use_reward_model": Only(
        (False,), "write False, and reward.terms.judge on the command line for a judging model"
    ),
    "reward.reward_type": Moved(
        ("reward.max_answer_tags",),
        _one_of({"searchr1": MANY_ANSWERS}, "write searchr1, and reward.terms on the command line for other terms"),
    ),
    "reward.reward_scale": Moved(("reward.terms",), lambda scale: {"exact_match": float(scale)}),
    "critic.use_critic_model": Only((False,), "write False, and algorithm=ppo on the command line for a critic"),
}

ROLLOUT: dict[str, Rule] = {
    "rollout.group_name": Idle(),
    "rollout.gpu_memory_utilization": _to("rollout.engine.memory_fraction"),
    "rollout.model.model_path": _MODEL,
    "rollout.model.model_type": Idle(),
    "rollout.model.precision": _PRECISION,
    "rollout.enforce_eager": Moved(("rollout.engine.cuda_graphs",), lambda eager: not eager),
    "rollout.distributed_executor_backend": Idle(),
    "rollout.disable_log_stats": Idle(),
    "rollout.detokenize": Only((True,), "turns are read, and end at stop strings, as text; write True"),
    "rollout.padding": Only((None,), "the tokenizer says it; write null"),
    "rollout.eos": Only((None,), "the tokenizer says it; write null"),
    "rollout.rollout_backend": Only(("sglang",), "rlsys generates with SGLang alone; write sglang"),
    "rollout.sglang.attention_backend": _to("rollout.engine.attention_backend"),
    "rollout.sglang.decode_log_interval": Idle(),
    "rollout.sglang.use_torch_compile": Only((False,), "engines are not compiled; write False"),
    "rollout.sglang.torch_compile_max_bs": Idle(),
    "rollout.return_logprobs": Idle(),
    "rollout.tensor_parallel_size": _to("rollout.engine.tp"),
    "rollout.pipeline_parallel_size": Only((1,), "an engine is cut by tensor_parallel_size alone; write 1"),
    "rollout.validate_weight": Idle(),
    "rollout.validate_weight_first_sync": Idle(),
    "rollout.validate_save_dir": Only((None,), "every tensor is compared by its hash at every sync; write null"),
    "rollout.print_outputs": Only((False,), "samples/ in the run's folder has trajectories as text; write False"),
    "rollout.max_running_requests": _to("rollout.engine.max_running"),
    "rollout.cuda_graph_max_bs": Joint(),
    "rollout.is_eval": Joint(),
}

_PARALLEL = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "sequence_parallel": "sequence_parallel",
}
_OPTIMIZER = {
    "lr": "lr",
    "min_lr": "min_lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "eps",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
    "use_distributed_optimizer": "distributed",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
}

OFFLOADS = ("actor.offload_optimizer", "actor.offload_weight", "actor.offload_grad")

MEGATRON: dict[str, Rule] = {
    **{f"actor.model.{name}": _to(f"actor.parallel.{ours}") for name, ours in _PARALLEL.items()},
    **{f"inference.model.{name}": _to(f"inference.parallel.{ours}") for name, ours in _PARALLEL.items()},
    **{f"actor.optim.{name}": _to(f"actor.optimizer.{ours}") for name, ours in _OPTIMIZER.items()},
    "inference.model_type": Idle(),
    "inference.group_name": Idle(),
    "inference.load_from_actor": Only((True,), "old log-probs are the actor's; write True"),
    "actor.group_name": Idle(),
    "actor.training_backend": Only(("megatron",), "rlsys trains with Megatron-core alone; write megatron"),
    "actor.mcore_gpt": Only((True,), "rlsys trains with Megatron-core alone; write True"),
    "actor.spec_name": Only(("decoder_gpt",), "write decoder_gpt, and model.layers=local or te on the command line"),
    **dict.fromkeys(OFFLOADS, Joint()),
    "actor.enable_dp_load_balance": Idle(),
    "actor.calculate_flops": Idle(),
    "actor.seed": _SEED,
    "actor.model.precision": _PRECISION,
    "actor.model.megatron_checkpoint": Only((None,), "write null, and runner.resume_dir to go on with a run"),
    "actor.model.seq_length": _LENGTH,
    "actor.model.encoder_seq_length": _LENGTH,
    "actor.model.add_bias_linear": Only((False,), "config.json of the model says it; write False"),
    "actor.model.activation": Only(("swiglu",), "config.json of the model says it; write swiglu"),
    "actor.model.normalization": Only(("rmsnorm",), "config.json of the model says it; write rmsnorm"),
    "actor.model.position_embedding_type": Only(("rope",), "config.json of the model says it; write rope"),
    "actor.model.recompute_granularity": Moved(("model.recompute",), _RECOMPUTE),
    "actor.model.recompute_method": Idle(),
    "actor.model.recompute_num_layers": Idle(),
    "actor.model.apply_rope_fusion": Idle(),
    "actor.model.bias_dropout_fusion": Idle(),
    "actor.model.persist_layer_norm": Idle(),
    "actor.model.bias_activation_fusion": Idle(),
    "actor.model.attention_softmax_in_fp32": Idle(),
    "actor.model.batch_p2p_comm": Idle(),
    "actor.model.variable_seq_lengths": Idle(),
    "actor.model.gradient_accumulation_fusion": Idle(),
    "actor.model.moe_token_dispatcher_type": Idle(),
    "actor.model.use_cpu_initialization": Idle(),
    "actor.optim.optimizer": Only(("adam",), "rlsys has AdamW alone; write adam"),
    "actor.optim.bf16": Joint(),
    "actor.optim.fp16": Only((False,), "rlsys trains in bf16 or fp32; write False"),
    "actor.optim.loss_scale": Idle(),
    "actor.optim.optimizer_enable_pin": Idle(),
    "actor.optim.overlap_param_gather_with_optimizer_step": Only((False,), "write False"),
    "actor.lr_sched.lr_warmup_fraction": Joint(),
    "actor.lr_sched.lr_warmup_init": Only((0, None), "the rate rises from 0; write 0.0"),
    "actor.lr_sched.lr_warmup_iters": Only((0, None), "write 0, and lr_warmup_fraction"),
    "actor.lr_sched.max_lr": _to("actor.optimizer.lr"),
    "actor.lr_sched.min_lr": _to("actor.optimizer.min_lr"),
    "actor.lr_sched.lr_decay_style": _to("actor.optimizer.decay"),
    "actor.lr_sched.lr_decay_iters": Joint(),
    "actor.tokenizer.tokenizer_model": _MODEL,
    "actor.tokenizer.use_fast": Idle(),
    "actor.tokenizer.trust_remote_code": Idle(),
    "actor.tokenizer.padding_side": Idle(),
    "actor.megatron.ddp_bucket_size": Idle(),
    "actor.megatron.distributed_backend": Idle(),
    "actor.megatron.distributed_timeout_minutes": Moved(
        ("cluster.call_timeout_s",), lambda minutes: 60.0 * float(minutes)
    ),
    "actor.megatron.ckpt_format": Idle(),
    "actor.megatron.use_dist_ckpt": Idle(),
    "actor.megatron.tp_comm_bootstrap_backend": Idle(),
    "actor.megatron.tp_comm_overlap_cfg": Only((None,), "write null"),
    "actor.megatron.use_hf_ckpt": Only((True,), "runs begin with a Hugging Face folder; write True"),
    "actor.megatron.use_profiler": Only((False,), "trace.json of a run has who worked when; write False"),
}

RULES: dict[str, Rule] = {
    "defaults": Joint(),
    **CLUSTER_AND_RUNNER,
    **ALGORITHM,
    **EPISODES,
    **ROLLOUT,
    **MEGATRON,
}

IDLE_BRANCHES = (
    "hydra",
    "rollout.vllm",
    "actor.megatron.ckpt_convertor",
    "actor.megatron.profiler",
    "reward.tokenizer",
)
"""Branches of which nothing counts: of Hydra, of the engine and the tools that are not in use, of what another key says."""
