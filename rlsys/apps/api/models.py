"""The folder of a model that is named as transformers names it: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from rlsys.errors import RunError, UserError

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Weights in safetensors, and what belongs to them: nothing that holds the same weights again."""


def model_folder(name: str | Path) -> Path:
    """The folder of model `name`, downloaded into the cache of transformers unless it is a folder or there already.

    Raises UserError for what is neither, RunError if the Hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_WANTED)))
    except HFValidationError as problem:
        raise UserError(
            f"model {name} is neither a folder nor the name of a model: give a Hugging Face folder, or a name such as "
            "Qwen/Qwen2.5-3B-Instruct."
        ) from problem
    except GatedRepoError as problem:
        raise UserError(f"model {name} is gated: ask for access on its page, then set HF_TOKEN.") from problem
    except RepositoryNotFoundError as problem:
        raise UserError(
            f"model {name} is no folder here, and on the Hub it does not exist or is private: check the name, or set "
            "HF_TOKEN."
        ) from problem
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as problem:
        raise RunError(
            f"model {name} is no folder here, and cannot be downloaded ({_first_line(problem)}): check the network, set "
            "HF_ENDPOINT to a mirror, or give a folder."
        ) from problem


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)
