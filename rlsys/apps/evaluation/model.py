"""Which model is evaluated: a Hugging Face folder as it is, or a Megatron checkpoint, converted for the time it takes.

A checkpoint of a run is taken only whole: what its manifest says must be there. The converted folder lies in a hidden one
of the evaluation's own, which is removed on the way out, also after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlsys.errors import UserError
from rlsys.files import read_yaml
from rlsys.orchestrator.resume import CHECKPOINTS, RUN_CONFIG
from rlsys.weights.checkpoint.store import MANIFEST, check, step_of
from rlsys.weights.convert.model_folder import CONFIG, MODEL, read_config

_ACTOR = "actor"
_SPEAKERS = ("ForCausalLM", "LMHeadModel")
"""How the architecture of a model that says text is called."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be evaluated."""

    folder: Path
    original: Path | None
    """Where config and tokenizer of a Megatron checkpoint are; None for a Hugging Face folder."""
    step: int | None = None
    """The step of a run's checkpoint."""

    @property
    def shape(self) -> Path:
        """The Hugging Face folder that says what model it is."""
        return self.original or self.folder


def find_model(path: Path, hf: Path | None, given: str) -> Model:
    """The model at `path`: a Hugging Face folder, a checkpoint, or a run's `global_step_N`; `hf` is `--hf`.

    `given` is how the user has named it, for sentences.

    Raises UserError for none of them, a checkpoint that is not whole, and one that does not say its original.
    """
    if not path.is_dir():
        raise UserError(
            f"{given} is not a folder: give a Hugging Face folder, or a checkpoint such as .../global_step_N/actor."
        )
    if (path / CONFIG).is_file():
        if hf is not None:
            raise UserError(f"--hf goes with a Megatron checkpoint, and {path} is a Hugging Face folder: leave it out.")
        return Model(path, None)
    here = path.resolve()
    saved, folder = (here.parent, path) if step_of(here) is None else (here, path / _ACTOR)
    step = step_of(saved)
    if step is not None and (saved / MANIFEST).is_file():
        check(saved)
    original = hf or _original(folder, saved)
    if original is None and (newest := _newest(path)) is not None:
        raise UserError(f"{given} is a run's folder: give one of its checkpoints, such as {newest}.")
    if original is None:
        raise UserError(
            f"{given} does not say what model it is of: it is no Hugging Face folder ({CONFIG} is missing), and with a "
            "Megatron checkpoint give the one that training began with as --hf."
        )
    if not (original / CONFIG).is_file():
        whose = "--hf" if hf else f"The original of {path},"
        raise UserError(
            f"{whose} {original} is not a Hugging Face folder, {CONFIG} is missing: give the one that training began with as "
            "--hf."
        )
    return Model(folder, original, step)


@contextmanager
def as_hf(model: Model, work: Path) -> Iterator[Path]:
    """The Hugging Face folder of `model`; one that has to be made lies in `work` until the context ends.

    Raises UserError for a checkpoint that does not fit its original, and for a model that says no text.
    """
    if model.original is None:
        _require_policy(model.folder, model.folder)
        yield model.folder
        return
    # Loads Megatron, which a Hugging Face folder does not need.
    from rlsys.weights.convert.directions import megatron_to_hf

    with TemporaryDirectory(dir=work, prefix=".model-") as room:
        converted = Path(room) / "hf"
        megatron_to_hf(model.folder, converted, model.original)
        _require_policy(converted, model.folder)
        yield converted


def _require_policy(hf: Path, given: Path) -> None:
    """Raise UserError for a model that does not say text: engines would make up the output layer that it lacks."""
    kinds = read_config(hf).get("architectures") or []
    named = ", ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
    if "Classification" in named:
        raise UserError(f"{given} is a critic ({named}), which answers nothing: give the actor beside it.")
    if named and not named.endswith(_SPEAKERS):
        raise UserError(f"{given} is a {named}, which does not continue text: give a ...ForCausalLM.")


def _newest(run: Path) -> Path | None:
    """The last checkpoint within a run's folder, or within its folder of checkpoints."""
    found = [one for place in (run, run / CHECKPOINTS) for one in place.glob("*") if step_of(one) is not None]
    return max(found, key=lambda one: step_of(one) or 0) / _ACTOR if found else None


def _original(folder: Path, saved: Path) -> Path | None:
    """What a checkpoint says it was made from: by `rlsys convert hf2mg`, or by a run."""
    if (folder / MODEL / CONFIG).is_file():
        return folder / MODEL
    file = saved / RUN_CONFIG
    if not file.is_file():
        return None
    try:
        return Path(read_yaml(file)["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{file} is damaged: give the original Hugging Face folder as --hf.") from problem
