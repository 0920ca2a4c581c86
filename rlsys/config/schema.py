"""The schema of a run: every key, its type, its unit and its default. Pure data, no behaviour.

Hydra composes a YAML tree at the edge (`rlsys.config.compose`), which is turned into these classes;
nothing past that edge sees a DictConfig. Every key here is read somewhere: a test holds that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.checkpoint import CheckpointConfig
from rlsys.config.guards import GuardsConfig
from rlsys.config.reward import RewardConfig
from rlsys.config.tracking import TrackingConfig

REQUIRED = "???"
"""Marks a key without a default: leaving it out stops the run with a sentence."""


class Device(StrEnum):
    """What the groups run on."""

    cpu = "cpu"
    gpu = "gpu"


class Mode(StrEnum):
    """Whether groups share devices."""

    disaggregated = "disaggregated"
    """Each group has its own, and all work at the same time."""
    collocated = "collocated"
    """They take turns on the same ones."""


class Layers(StrEnum):
    """Which transformer layers Megatron is built from."""

    auto = "auto"
    te = "te"
    local = "local"


class Dtype(StrEnum):
    """Numeric type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class TokenMode(StrEnum):
    """How a multi-turn context is kept."""

    retokenize = "retokenize"
    """As text, which every turn and the training tokenise anew."""
    append = "append"
    """As tokens: those that were sampled stay, observations are tokenised alone."""


Schedule = StrEnum("Schedule", ["sequential", "pipelined", "async"])
"""What runs at the same time. `sequential`: nothing, each stage waits for the whole step of the one before.
`pipelined`: all stages, within a step, strictly on-policy. `async`: rollouts run up to `max_staleness` versions
ahead of training."""

OnUpdate = StrEnum("OnUpdate", ["finish", "continue"])
"""What episodes in flight do when new weights come: end on the old ones, or pause and go on with the new."""


class SyncMode(StrEnum):
    """How weights travel from the actor to the other groups."""

    tensor = "tensor"
    """Through memory that processes of one host share."""
    broadcast = "broadcast"
    """Through a process group of the actor's first rank and all receivers: gloo on CPUs, NCCL on GPUs."""
    disk = "disk"
    """Through files in the run's folder."""
    ipc = "ipc"
    """Through device memory that processes of one host share (CUDA IPC): the bytes never leave the GPUs."""


class Attention(StrEnum):
    """Which of Transformer Engine's attention kernels a Megatron model uses."""

    auto = "auto"
    flash = "flash"
    fused = "fused"
    unfused = "unfused"


class Packing(StrEnum):
    """How sequences lie in a micro-batch."""

    packed = "packed"
    """One after the other, without padding."""
    padded = "padded"
    """Those of like length padded to one rectangle."""


class CassetteMode(StrEnum):
    """What is done with recorded search calls."""

    record = "record"
    """Ask the server, and write every call to the cassette."""
    replay = "replay"
    """Answer from the cassette, after the recorded time; a call that is not on it fails."""
    extend = "extend"
    """Answer from the cassette; ask the server for what is not on it, and write that to it."""


class LrDecay(StrEnum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class ModelConfig:
    """The policy."""

    path: str = REQUIRED
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    layers: Layers = Layers.auto
    """`te` where Transformer Engine is installed, else `local`; `auto` chooses."""
    dtype: Dtype = Dtype.bfloat16
    """Of the trained and the inference model."""
    recompute: bool = False
    """Recompute activations in the backward pass (less memory, a third more time)."""
    attention: Attention = Attention.auto
    """Of Transformer Engine's layers; `auto` is its own choice. Local layers have torch's fused attention alone."""
    fusions: bool = True
    """Fused kernels (SwiGLU, rotary positions, gradients added to the buffer) where Transformer Engine or apex has them."""
    fp8: bool = False
    """Matrix products of all Megatron models in FP8, so that ratios begin at 1; Transformer Engine on Ada, Hopper or newer."""


@dataclass
class ParallelConfig:
    """How one Megatron group is cut. Data parallel size is what the placement leaves."""

    tp: int = 1
    """Tensor parallel: ranks that share every layer."""
    pp: int = 1
    """Pipeline parallel: stages of layers."""
    cp: int = 1
    """Ranks that every sequence is cut over; each works on that share of a micro-batch. Packed sequences alone."""
    ep: int = 1
    """Neighbouring ranks of a pipeline stage, tensor-parallel ones included, that the experts are spread over."""
    pp_layers: list[int] | None = None
    """Layers of each pipeline stage where they are uneven; null splits evenly."""
    sequence_parallel: bool = False
    """Cut norms and dropout along the sequence too; needs tp > 1."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    min_lr: float = 0.0
    """To which it decays."""
    decay: LrDecay = LrDecay.constant
    warmup_fraction: float = 0.0
    """Share of all optimiser steps over which the rate rises linearly."""
    weight_decay: float = 0.01
    """Of AdamW; not on biases and norms."""
    beta1: float = 0.9
    """Memory of the mean of gradients."""
    beta2: float = 0.999
    """Memory of the mean of their squares."""
    eps: float = 1e-8
    """Added to the root of that."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 clips none."""
    distributed: bool = True
    """Shard the optimiser's state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the last micro-batch of an optimiser step is still in its backward pass."""
    overlap_param_gather: bool = False
    """Gather updated weights from data-parallel ranks while the next forward pass is under way; needs the two
    above."""


@dataclass
class ActorConfig:
    """The group that trains."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batch_tokens: int = 16384
    """Most tokens, padding included, of one forward and backward pass of one rank."""
    packing: Packing = Packing.packed


@dataclass
class InferenceConfig:
    """The group that recomputes log-probs."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_tokens: int = 32768
    """Most tokens, padding included, of one forward pass of one rank."""
    packing: Packing = Packing.packed


@dataclass
class CriticConfig:
    """The group that learns values; there is one where `algorithm.baseline` is critic."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    micro_batch_tokens: int = 16384
    """Most tokens, padding included, of one forward and backward pass of one rank."""
    packing: Packing = Packing.packed
    value_clip: float | None = 0.5
    """How far a value may move from what it was before the update and still gain by it; null does not clip."""
    warmup_steps: int = 0
    """Steps at the beginning of a run in which the critic alone learns."""


@dataclass
class EngineConfig:
    """One SGLang engine."""

    tp: int = 1
    """Tensor parallel: devices of one engine."""
    dtype: Dtype = Dtype.bfloat16
    attention_backend: str = "auto"
    """SGLang's name of it; `auto` is SGLang's own choice on a GPU and torch_native on a CPU."""
    memory_fraction: float = 0.8
    """Share of the device's memory for weights and KV cache."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache; null lets SGLang fill `memory_fraction`."""
    max_running: int = 256
    """Most sequences decoded at once."""
    cuda_graphs: bool = True
    """Replay recorded kernels when decoding; off takes less memory. A CPU has none."""
    start_timeout_s: float = 600.0
    """For an engine to answer."""


@dataclass
class SamplingConfig:
    """How rollouts are drawn; with `compat.sampled_validation` also the answers of evaluations."""

    temperature: float = 1.0
    """By which logits are divided, in rollouts and in recomputed log-probs."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this share; 1 is the whole vocabulary."""
    top_k: int = -1
    """Draw from so many of the likeliest tokens; -1 is the whole vocabulary."""
    stop: list[str] = field(default_factory=lambda: ["</search>", "</answer>"])
    """Strings at which the engine ends a turn; they stay in the text."""
    accept_truncation: bool = False
    """Allow top_p and top_k although the loss scores the whole vocabulary, which biases its ratios."""


@dataclass
class RolloutConfig:
    """The group that generates."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_episodes: int = 256
    """Most episodes in flight on one engine."""
    episode_timeout_s: float = 600.0
    """An episode that takes longer is aborted and counted."""


@dataclass
class TagsConfig:
    """The words of the protocol."""

    search: str = "search"
    """Around a query."""
    answer: str = "answer"
    """Around the answer."""
    information: str = "information"
    """Around what was found."""


@dataclass
class TaskConfig:
    """What is asked, and the limits of an episode."""

    train_path: str = REQUIRED
    """Questions to train on: jsonl or parquet of Search-R1 rows."""
    eval_path: str = REQUIRED
    """Held-out questions."""
    tools: list[str] = field(default_factory=list)
    """Tools beside the search, each as `package.module.Class`; see docs/tools.md."""
    tags: TagsConfig = field(default_factory=TagsConfig)
    invalid_message: str = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
        "</search>. If I want to give the final answer, I should put the answer between <answer> and "
        "</answer>. Let me try again.\n"
    )
    """What the environment says to a turn that neither searches nor answers."""
    max_turns: int = 4
    """Turns in which a search is carried out or a tool called; one more may only answer."""
    max_prompt_tokens: int = 2048
    """A longer question is refused."""
    max_turn_tokens: int = 500
    """Most tokens generated in a turn."""
    max_observation_tokens: int = 500
    """A longer observation is cut, its closing tag kept."""
    max_total_tokens: int = 7096
    """Prompt, turns and observations together."""
    token_mode: TokenMode = TokenMode.retokenize
    train_eos: bool = True
    """Append the end-of-sequence token after the answer and train it."""


@dataclass
class CassetteConfig:
    """Search calls recorded and played back, so that runs repeat."""

    path: str | None = None
    """A jsonl file of recorded calls; null asks the server every time."""
    mode: CassetteMode = CassetteMode.replay
    latency_scale: float = 1.0
    """A played call takes this times a recorded time, drawn by the query."""


@dataclass
class SearchConfig:
    """The search tool's client, and the server that a run starts for itself when `url` is null."""

    enabled: bool = True
    """Whether the policy can search; without it there is no server, and the tag of the search means nothing."""
    url: str | None = None
    """A running server, e.g. http://127.0.0.1:8000; null starts one for the run."""
    replicas: list[str] = field(default_factory=list)
    """Further servers of the same index beside `url`; each search goes to one that answers."""
    token_env: str | None = None
    """Environment variable with the servers' bearer token, on the host of the driver."""
    hedge_after_s: float | None = None
    """Ask a second replica when the first has not answered by then; null never does."""
    index: str | None = None
    """Folder made by `rlsys search index`; needed when `url` is null."""
    topk: int = 3
    """Passages of a search."""
    timeout_s: float = 30.0
    """Of one request."""
    retries: int = 8
    """Further tries, after growing pauses (20 s in all), of a search that no replica answered."""
    max_concurrent: int = 64
    """Requests in flight from one engine's episodes."""
    start_timeout_s: float = 180.0
    """For a server that is started with the run to answer."""
    cassette: CassetteConfig = field(default_factory=CassetteConfig)


@dataclass
class SearchNodesConfig:
    """Search servers that a launcher starts with the cluster."""

    nodes: list[str] = field(default_factory=list)
    """Machines that serve `search.index`, each by its node rank or host name; empty starts none."""
    port: int = 8000
    """At which each of them listens."""
    device: str = "cpu"
    """Of their encoders: cpu, cuda or cuda:N."""


@dataclass
class ClusterConfig:
    """Machines and who is placed where."""

    device: Device = Device.gpu
    nodes: int = 1
    """Machines."""
    devices_per_node: int | None = None
    """Of each machine: ranks 0 to n-1 are the first one's, and so on. Null: all ranks are on one machine."""
    device_memory_gib: float | None = None
    """Of each device, for the check of the memory plan; null does not check."""
    mode: Mode = Mode.disaggregated
    placement: dict[str, str] = field(default_factory=lambda: {"actor": "0-3", "inference": "4", "rollout": "5-7"})
    """Device ranks of each group: "0-3", "4", "0-1,4-5". CPU slots in the cpu profile. `critic`, where there is one,
    shares the actor's unless it is placed."""
    address: str | None = None
    """A running Ray cluster; null starts a local one for the run and ends it with the run."""
    threads: int | None = None
    """Threads of each worker process; null leaves the libraries' default."""
    start_timeout_s: float = 600.0
    """For all workers of a group to be ready."""
    call_timeout_s: float = 1800.0
    """For one call to a worker; then the run ends and names who is missing."""
    sync_mode: SyncMode = SyncMode.tensor
    sync_bucket_bytes: int = 2 * 1024**3
    """Most bytes of weights on their way at a time, no less than the largest tensor has; two buckets are held."""
    search: SearchNodesConfig = field(default_factory=SearchNodesConfig)


@dataclass
class ScheduleConfig:
    """What runs at the same time, and how old a token may be when it is trained."""

    kind: Schedule = Schedule.pipelined
    max_staleness: int = 1
    """Of `async`: most versions between the one that sampled a token and the one that is trained on it."""
    on_update: OnUpdate = OnUpdate.finish
    """Of `async`: what episodes in flight do when new weights come."""


@dataclass
class TrainerConfig:
    """The loop."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    steps: int = 100
    """Steps of the run: rollouts, training and new weights for the engines."""
    prompts_per_step: int = 512
    """Questions of a step."""
    mini_batches: int = 1
    """Optimiser steps of one step, `prompts_per_step` at most; where they do not divide it, some train on one question
    more than others."""
    seed: int = 1234
    """Of the order of questions, of sampling and of initial weights that a model lacks."""


@dataclass
class EvalConfig:
    """Held-out questions during training."""

    interval: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    limit: int | None = None
    """Most questions asked at an evaluation; null asks all."""
    samples: int = 1
    """Answers to each question."""
    temperature: float = 0.0
    """At which answers are drawn; 0 is greedy."""
    engines: int | None = None
    """Engines that are asked while the others go on with rollouts; null asks all, between steps."""


@dataclass
class CompatConfig:
    """Quirks of Search-R1's code, to reproduce its published numbers. See docs/algorithms.md."""

    answer_over_prompt: bool = False
    """Read the answer from prompt and response together, so that the prompt's example may count."""
    sampled_validation: bool = False
    """Draw the answers of evaluations as rollouts are drawn, not greedily."""
    validation_batch: int | None = None
    """Leave out the held-out questions after the last whole batch of so many; null asks all."""
    observations_in_values: bool = False
    """Let observation tokens take part in the critic's loss, in advantage estimation and in whitening."""


@dataclass
class RunConfig:
    """Everything that a run is."""

    name: str = "run"
    """Of the run; its folder is called so, with the time behind it."""
    output_dir: str = "outputs"
    """Folder in which the run's folder is made."""
    resume: str = "none"
    """Where to go on: `auto` with the newest run of this name that has a checkpoint, if there is one, a folder of a run
    or of a checkpoint, or `none`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
