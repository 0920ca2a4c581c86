"""What an encoder was trained with, as data: prefixes, pooling and normalisation.

A family is a row of FAMILIES, after the model cards, or is read from the files that sentence-transformers puts
beside the weights (`read_sentence_transformers`). `resolve_family` settles which of the two holds: what the
caller gives comes first, then the name, then the files; where name and files disagree nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsys.errors import UserError
from rlsys.search.encoders.files import read_json


class Pooling(StrEnum):
    """How token states become one vector."""

    MEAN = "mean"
    CLS = "cls"
    POOLER = "pooler"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Family:
    """What a kind of encoder was trained with."""

    query_prefix: str
    passage_prefix: str
    pooling: Pooling
    normalize: bool


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the caller sets in place of the family's fields; None leaves a field as the family has it."""

    pooling: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    normalize: bool | None = None

    def apply(self, family: Family) -> Family:
        """The family with these fields set. Raises UserError for an unknown pooling."""
        if self.pooling is not None and self.pooling not in list(Pooling):
            raise UserError(f"pooling {self.pooling!r} is unknown: choose one of {', '.join(Pooling)}")
        return Family(
            family.query_prefix if self.query_prefix is None else self.query_prefix,
            family.passage_prefix if self.passage_prefix is None else self.passage_prefix,
            family.pooling if self.pooling is None else Pooling(self.pooling),
            family.normalize if self.normalize is None else self.normalize,
        )


_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_BGE = Family("Represent this sentence for searching relevant passages: ", "", Pooling.CLS, True)
_PLAIN = Family("", "", Pooling.MEAN, True)

SENTENCE_TRANSFORMERS = "sentence-transformers"
"""Name of the family whose fields are read from the model's own files."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
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
)


def known_families() -> list[str]:
    """Every name that `resolve_family` takes beside `auto`."""
    return [*FAMILIES, SENTENCE_TRANSFORMERS]


def resolve_family(
    name: str, folder: Path, family: str = "auto", overrides: Overrides | None = None
) -> tuple[str, Family]:
    """The family's name and its fields with `overrides` applied.

    `auto` reads the last part of `name`, then sentence-transformers' files in `folder`. Raises UserError for an
    unknown family, a name that tells none and has no such files, or files that contradict the name.
    """
    overrides = overrides or Overrides()
    if family == "auto":
        key, found = _detect(name, folder, overrides)
        return key, overrides.apply(found)
    if family in FAMILIES:
        return family, overrides.apply(FAMILIES[family])
    if family != SENTENCE_TRANSFORMERS:
        raise UserError(f"encoder family {family!r} is unknown: choose {_choices(known_families())}")
    files = read_sentence_transformers(folder)
    if files is None:
        raise UserError(
            f"{folder} has no modules.json to read the family of encoder {name!r} from: give {_choices(FAMILIES)}"
        )
    return family, overrides.apply(files)


def family_of_name(name: str) -> str | None:
    """The key in FAMILIES whose words are all words of the last part of `name`; None if there is not one.

    `bge-m3` is one family though `bge` fits too, because it says more; `bge-e5` is none.
    """
    words = _words(Path(name).name)
    fitting = [key for key in FAMILIES if _words(key) <= words]
    most = [key for key in fitting if not any(_words(key) < _words(other) for other in fitting)]
    return most[0] if len(most) == 1 else None


def _detect(name: str, folder: Path, overrides: Overrides) -> tuple[str, Family]:
    key, files = family_of_name(name), read_sentence_transformers(folder)
    if key is None and files is None:
        raise UserError(f"the family of encoder {name!r} cannot be told from its name: give {_choices(FAMILIES)}")
    if key is None:
        assert files is not None
        return SENTENCE_TRANSFORMERS, files
    found = FAMILIES[key]
    if files is not None and _shape(overrides.apply(found)) != _shape(overrides.apply(files)):
        raise UserError(
            f"encoder {name!r} is {key} ({_shape(found)}) by its name and {_shape(files)} by its modules.json: "
            f"give family {key} or {SENTENCE_TRANSFORMERS}"
        )
    return key, found


def read_sentence_transformers(folder: Path) -> Family | None:
    """The family that `folder`'s own modules.json describes; None without that file.

    Raises UserError for a module, a way of pooling or a file that cannot be followed exactly.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = read_json(folder / "modules.json")
    try:
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: folder / module["path"] for module in modules}
    except (TypeError, KeyError):
        raise UserError(f"{folder / 'modules.json'} is no list of modules: give the encoder's family") from None
    strange = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if strange or "Pooling" not in kinds:
        raise UserError(
            f"{folder / 'modules.json'} lists {', '.join(kinds)}: only Transformer, Pooling and Normalize are supported"
        )
    prompts_file = folder / "config_sentence_transformers.json"
    prompts = (read_json(prompts_file).get("prompts") or {}) if prompts_file.is_file() else {}
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
            "only mean, cls or lasttoken over the whole text is supported"
        )
    return known[modes[0]]


def _shape(family: Family) -> str:
    return f"{family.pooling} pooling, {'' if family.normalize else 'not '}normalised"


def _words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


def _choices(names: Mapping[str, Any] | list[str]) -> str:
    return f"one of {', '.join(names)}"
