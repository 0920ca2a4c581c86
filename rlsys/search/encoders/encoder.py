"""Runs dense encoders, which map a text to a vector, and cross-encoders, which score a (query, passage) pair.

Invariant: a vector depends only on its text, and a score only on its pair, not on the batch (except for rounding).

Scores equal the scores of sentence-transformers' CrossEncoder: the logit of the only label, passed through the
activation named in the model's files (sigmoid or none; sigmoid by default). For a model with two labels (not relevant,
relevant), the logit is the second minus the first; its sigmoid is the probability of "relevant".

Sequence packing: search queries have few tokens and unequal lengths. Padding to the longest query of a batch wastes
half of the compute, and a batch per length would need many forward passes. Therefore short texts are packed into shared
lines. A block-diagonal attention mask and position ids that restart per text give each text the same states as in a
line of its own. The model must honour the given mask and positions (`shares_lines`). The tokens of a text are
contiguous in one line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence

from rlsys.errors import UserError, first_line
from rlsys.files import sha256_of
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Family, Floats, Pooling, read_json, resolve_folder

Lines = list[list[int]]
"""Rows (texts) packed into each line of a forward pass."""
_LEAST_WIDTH = 32
"""Minimum width of a shared line, in tokens; narrower lines are more numerous, wider lines cost more attention."""
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    folder: Path
    model: Any
    tokenizer: Any
    checksum: str
    """SHA-256 of the concatenated SHA-256 digests of the weight files, in path order, in hex."""


class Encoder:
    """A loaded dense encoder. Not thread-safe."""

    def __init__(self, name: str, family_name: str, family: Family, loaded: LoadedModel, max_tokens: int) -> None:
        self._tokenizer, self._model, config = loaded.tokenizer, loaded.model, loaded.model.config
        projection = getattr(config, "projection_dim", 0) if family.pooling is Pooling.POOLER else 0
        dimension = int(projection or config.hidden_size)
        self.facts = EncoderFacts(name, family_name, family, max_tokens, dimension, loaded.checksum)

    @classmethod
    def load(cls, name: str, family: str = "auto", **options: Any) -> Encoder:
        """Load `EncoderSpec(name, family, **options)`. Raises UserError for invalid options or missing weights."""
        spec = EncoderSpec(name, family, **options)
        folder = resolve_folder(name)
        family_name, resolved = spec.resolve_family(folder)
        dispensable = None if resolved.pooling is Pooling.POOLER else "pooler"
        loaded = load_model(name, _architecture(name, folder), spec.max_tokens, spec.device, spec.dtype, dispensable)
        return cls(name, family_name, resolved, loaded, spec.max_tokens)

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """Return vectors [n, dimension], row i for the query prefix + `texts[i]`."""
        return self._encode([self.facts.family.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Floats:
        """Return vectors [n, dimension], row i for the passage prefix + `texts[i]`."""
        return self._encode([self.facts.family.passage_prefix + text for text in texts])

    def close(self) -> None:
        """No-op; the weights are freed with the last reference."""

    def _encode(self, texts: list[str]) -> Floats:
        vectors = np.empty((len(texts), self.facts.dimension), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(clean(texts), truncation=True, max_length=self.facts.max_tokens)["input_ids"]
        # A model needs at least one token, but some tokenizers return none for an empty text.
        tokens = [ids or [self._tokenizer.pad_token_id] for ids in tokens]
        share = self.facts.family.pooling is not Pooling.POOLER and shares_lines(self._model)
        for lines in plan(list(map(len, tokens)), pass_cost(self._model.device), share=share):
            vectors[[row for line in lines for row in line]] = self._forward(tokens, lines)
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[Sequence[int]], lines: Lines) -> Floats:
        """Return vectors [rows, dimension], in the order of the rows in `lines`."""
        family = self.facts.family
        batch = Batch.of([[tokens[row] for row in line] for line in lines], self._tokenizer.pad_token_id or 0)
        output = self._model(**batch.inputs(self._model.device))
        if family.pooling is Pooling.POOLER:
            pooled = output.pooler_output.float()
        else:
            pool = {Pooling.CLS: batch.first, Pooling.LAST: batch.last, Pooling.MEAN: batch.mean}[family.pooling]
            pooled = pool(output.last_hidden_state.float())
        if family.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.cpu().numpy()


def _architecture(name: str, folder: Path) -> Any:
    """Return the transformers class to load: AutoModel, or DPRContextEncoder for a DPR passage encoder.

    AutoModel would load a DPR passage encoder as a question encoder. Raises UserError for an unreadable model and for a
    reranker.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name!r} cannot be loaded from {folder}: {first_line(error)}.", code="malformed", key=name
        ) from error
    named = config.architectures or []
    if any("SequenceClassification" in architecture for architecture in named):
        raise UserError(
            f"model {name!r} is a reranker ({named[0]}), which gives no vectors: give an encoder.",
            code="unsupported",
            key=name,
        )
    return transformers.DPRContextEncoder if "DPRContextEncoder" in named else transformers.AutoModel


def load_model(
    name: str, architecture: Any, max_tokens: int, device: str, dtype: str | None, dispensable: str | None = None
) -> LoadedModel:
    """Load the model `name` with `architecture`, a transformers class with `from_pretrained`.

    Raises UserError for missing weights (unless their names contain `dispensable`), for `max_tokens` beyond the model's
    positions, and for an unknown device or dtype.
    """
    place = _resolve_device(device)
    if dtype not in (None, *_DTYPES):
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(_DTYPES)}.", code="unknown", key="dtype")
    precision = _DTYPES[dtype or ("float32" if place.type == "cpu" else "float16")]
    folder = resolve_folder(name)
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Mismatched sizes raise UserError below, with the name of the weight.
        model, info = architecture.from_pretrained(
            folder, dtype=precision, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model {name!r} cannot be loaded from {folder}: {first_line(error)}.", code="malformed", key=name
        ) from error
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if lacking := {key for key in lacking if dispensable is None or dispensable not in key}:
        problem = f"model {name!r} lacks {len(lacking)} weights, such as {min(lacking)}"
        raise UserError(
            f"{problem}: check that {folder} holds the model that its config.json names.", code="mismatch", key=name
        )
    # Without a vocabulary, transformers returns a tokenizer that maps every word to unknown.
    names = sorted(tokenizer.vocab_files_names.values())
    if not any((folder / file).is_file() for file in names):
        raise UserError(
            f"model {name!r} has no tokenizer: {folder} holds none of {', '.join(names)}.", code="not_found", key=name
        )
    most = min([tokenizer.model_max_length, *_positions(model)])
    if not 1 <= max_tokens <= most:
        raise UserError(
            f"max_tokens {max_tokens} is out of range: model {name!r} takes 1 to {most}.",
            code="out_of_range",
            key="max_tokens",
        )
    model.config.use_cache = False
    model = model.eval().to(place)
    if place.type == "cpu":
        # Transposed weight storage cuts the time of a single short text by 1/6 (MKL, one core).
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()
    files = sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    checksum = hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in files)).hexdigest()
    return LoadedModel(folder, model, tokenizer, checksum)


def _resolve_device(device: str) -> torch.device:
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is unknown: give cpu, cuda or cuda:N.", code="unknown", key="device")
    count = torch.cuda.device_count() if resolved.type == "cuda" else 0
    if resolved.type == "cuda" and count <= (resolved.index or 0):
        sees = f"only cuda:0 to cuda:{count - 1}" if count else "no GPU"
        problem = f"device {device}: torch sees {sees}; give another device, or check the driver (`nvidia-smi`)"
        raise UserError(
            f"{problem}, CUDA_VISIBLE_DEVICES and that torch is built for CUDA.", code="no_room", key="device"
        )
    return resolved


def _positions(model: torch.nn.Module) -> list[int]:
    """Return the number of usable rows of each table of learned positions: the rows after its padding index."""
    return [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and path.endswith("position_embeddings")
    ]


class Reranker:
    """A loaded cross-encoder. Not thread-safe."""

    def __init__(self, name: str, loaded: LoadedModel, max_tokens: int) -> None:
        self.name, self.max_tokens, self.checksum = name, max_tokens, loaded.checksum
        self._tokenizer, self._model = loaded.tokenizer, loaded.model
        self._sigmoid = _has_sigmoid(name, loaded)

    @classmethod
    def load(cls, name: str, *, max_tokens: int = 512, device: str = "cpu", dtype: str | None = None) -> Reranker:
        """Load a Hugging Face folder or a model in the local Hugging Face cache.

        Pairs are truncated to `max_tokens`, special tokens included; the longer text is shortened first. `dtype` is
        float32, float16 or bfloat16; None is float16 on a GPU and float32 on a CPU. Raises UserError for an unknown
        model, device or dtype, missing weights, and more than two labels.
        """
        architecture = transformers.AutoModelForSequenceClassification
        loaded = load_model(name, architecture, max_tokens, device, dtype)
        labels = loaded.model.config.num_labels
        if labels > 2:
            raise UserError(
                f"model {name!r} has {labels} labels: give a reranker of one, or of two (no and yes).",
                code="unsupported",
                key=name,
            )
        return cls(name, loaded, max_tokens)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the score of each (query, passage); higher is better, in [0, 1] with a sigmoid activation."""
        if not pairs:
            return []
        queries, passages = (clean(side) for side in zip(*pairs, strict=True))
        limits = {"truncation": True, "max_length": self.max_tokens}
        columns = self._tokenizer(queries, passages, **limits, return_attention_mask=False)
        scores = np.empty(len(pairs))
        for rows in length_buckets(list(map(len, columns["input_ids"])), pass_cost(self._model.device)):
            scores[rows] = self._forward({name: [column[row] for row in rows] for name, column in columns.items()})
        return [float(score) for score in scores]

    def describe(self) -> Mapping[str, Any]:
        """Return name, checksum, max_tokens and activation."""
        settings = {"max_tokens": self.max_tokens, "activation": "sigmoid" if self._sigmoid else "none"}
        return {"reranker": self.name, "reranker_sha256": self.checksum, **settings}

    @torch.inference_mode()
    def _forward(self, columns: Mapping[str, list[list[int]]]) -> np.ndarray[Any, Any]:
        device = self._model.device
        fillers = {"input_ids": self._tokenizer.pad_token_id or 0}
        columns = {**columns, "attention_mask": [[1] * len(ids) for ids in columns["input_ids"]]}
        inputs = {
            name: pad_sequence(list(map(torch.tensor, column)), batch_first=True, padding_value=fillers.get(name, 0))
            for name, column in columns.items()
        }
        logits = self._model(**{name: tokens.to(device) for name, tokens in inputs.items()}).logits.float()
        logit = logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        return (logit.sigmoid() if self._sigmoid else logit).cpu().numpy()


def _has_sigmoid(name: str, loaded: LoadedModel) -> bool:
    """True if the activation is sigmoid (the default), False if it is the identity.

    Reads the three config keys that CrossEncoder has used. Raises UserError for any other activation.
    """
    config, beside = loaded.model.config, loaded.folder / "config_sentence_transformers.json"
    named = (
        (read_json(beside) if beside.is_file() else {}).get("activation_fn")
        or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or "Sigmoid"
    )
    kind = str(named).rsplit(".", 1)[-1]
    if kind not in ("Sigmoid", "Identity"):
        raise UserError(
            f"model {name!r} has the activation {named}: give one with Sigmoid or Identity.",
            code="unsupported",
            key=name,
        )
    return kind == "Sigmoid"


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cost model of a forward pass, in units of one token's cost.

    A pass holds up to `most_tokens`, padding included. `fixed_tokens` is its constant cost: reading the weights on a
    CPU, launching kernels on a GPU.
    """

    most_tokens: int
    fixed_tokens: int


_CPU = PassCost(most_tokens=2048, fixed_tokens=20)
"""Measured with MiniLM on one thread: 3 ms fixed and 0.14 ms per token; both scale alike with model size. Larger passes
exceed a core's cache."""
_GPU = PassCost(most_tokens=65536, fixed_tokens=4096)


def pass_cost(device: torch.device) -> PassCost:
    return _CPU if device.type == "cpu" else _GPU


def length_buckets(lengths: Sequence[int], cost: PassCost) -> list[NDArray[np.int64]]:
    """Group rows, shortest first, into passes of minimal total cost, trading padding for the fixed cost of a pass.

    Each row is in exactly one pass. A pass stays within `cost.most_tokens`, padding included; a longer row gets a pass
    of its own.
    """
    order = np.argsort(lengths, kind="stable")
    widths, first_rows = np.unique(np.asarray(lengths)[order], return_index=True)
    ends = np.append(first_rows[1:], len(order))
    # For the rows of the k smallest widths: least[k] is the minimal cost, and begins[k] is the index of the smallest
    # width in the last bucket.
    least = np.zeros(len(widths) + 1)
    begins = np.zeros(len(widths) + 1, dtype=np.int64)
    for last, width in enumerate(widths):
        tokens = (ends[last] - first_rows[: last + 1]) * width
        costs = least[: last + 1] + tokens + cost.fixed_tokens * np.ceil(tokens / cost.most_tokens)
        begins[last + 1] = np.argmin(costs)
        least[last + 1] = costs[begins[last + 1]]
    buckets: list[NDArray[np.int64]] = []
    end = len(widths)
    while end:
        begin = int(begins[end])
        rows = order[first_rows[begin] : ends[end - 1]]
        most_rows = max(1, cost.most_tokens // int(widths[end - 1]))
        buckets[:0] = [rows[first : first + most_rows] for first in range(0, len(rows), most_rows)]
        end = begin
    return buckets


def clean(texts: Sequence[str]) -> list[str]:
    """Replace lone surrogates, which tokenizers reject, by `?`."""
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]


def shares_lines(model: Any) -> bool:
    """True if texts keep their states when packed into one line; verified only for BERT on a CPU."""
    return (
        type(model) is transformers.BertModel
        and model.device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and not model.config.is_decoder
    )


def plan(lengths: Sequence[int], cost: PassCost, *, share: bool) -> list[Lines]:
    """Return the passes of minimal cost, with one row per line.

    With `share`, several rows are packed into each line if that costs less.
    """
    buckets = length_buckets(lengths, cost)
    alone = [[[row] for row in rows.tolist()] for rows in buckets]
    if not share or len(lengths) < 2:
        return alone
    width = max(_LEAST_WIDTH, *lengths)
    lines = first_fit(lengths, width)
    per_pass = max(1, cost.most_tokens // width)
    packed = [lines[first : first + per_pass] for first in range(0, len(lines), per_pass)]
    padded_tokens = sum(len(rows) * lengths[rows[-1]] for rows in buckets)
    cheaper = len(lines) * width + cost.fixed_tokens * len(packed) < padded_tokens + cost.fixed_tokens * len(alone)
    return packed if cheaper else alone


def first_fit(lengths: Sequence[int], width: int) -> Lines:
    """Pack rows into lines of `width` tokens by first fit, longest rows first."""
    lines: Lines = []
    room: list[int] = []
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        line = next((number for number, free in enumerate(room) if free >= lengths[row]), len(lines))
        if line == len(lines):
            lines.append([])
            room.append(width)
        lines[line].append(row)
        room[line] -= lengths[row]
    return lines


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts packed into lines for one forward pass, numbered in line order.

    Shape [lines, width]: token `ids`, `positions` within the text, `owners` (text number, -1 for padding).
    Shape [texts]: `starts` in the flattened lines, `lengths` in tokens.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, lines: Sequence[Sequence[Sequence[int]]], filler: int) -> Batch:
        """Pack the texts (token ids) of each line from the left and pad with `filler`."""
        width = max(sum(map(len, line)) for line in lines)
        shape = (len(lines), width)
        ids, positions = np.full(shape, filler, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        owners = np.full(shape, -1, dtype=np.int64)
        starts: list[int] = []
        lengths: list[int] = []
        for number, line in enumerate(lines):
            at = 0
            for text in line:
                span = slice(at, at + len(text))
                ids[number, span], positions[number, span] = text, np.arange(len(text))
                owners[number, span] = len(starts)
                starts.append(number * width + at)
                lengths.append(len(text))
                at += len(text)
        return cls(ids, positions, owners, np.array(starts), np.array(lengths))

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments."""
        owners = torch.from_numpy(self.owners).to(device)
        inputs = {"input_ids": torch.from_numpy(self.ids).to(device)}
        if len(self.starts) == len(self.ids):
            # Padding is always on the right, whatever the tokenizer's side, so causal models never attend to it.
            return inputs | {"attention_mask": (owners >= 0).long()}
        mask = owners[:, None, :, None] == owners[:, None, None, :]
        return inputs | {"position_ids": torch.from_numpy(self.positions).to(device), "attention_mask": mask}

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """Return each text's first token state, [texts, dim], from `states` [lines, width, dim]."""
        return states.flatten(0, 1)[torch.from_numpy(self.starts).to(states.device)]

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """Return each text's last token state, [texts, dim], from `states` [lines, width, dim]."""
        return states.flatten(0, 1)[torch.from_numpy(self.starts + self.lengths - 1).to(states.device)]

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Return the mean over each text's token states, [texts, dim], from `states` [lines, width, dim]."""
        owners = torch.from_numpy(self.owners).to(states.device).flatten()
        taken = owners >= 0
        sums = states.new_zeros(len(self.starts), states.shape[-1])
        sums.index_add_(0, owners[taken], states.flatten(0, 1)[taken])
        return sums / torch.from_numpy(self.lengths).to(states.device).unsqueeze(-1)
