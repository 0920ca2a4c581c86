"""The audit of a run's folder."""

from __future__ import annotations

from pathlib import Path

from rlsys.config.schema import TokenMode
from rlsys.errors import UserError
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.settings import section
from rlsys.report.audit.text import OtherTokeniser
from rlsys.report.audit.tokens import TokenAudit, audit
from rlsys.rollout.agent.codec import Codec

NEEDED = "tokenizer.json"


def audit_run(run: RunFolder, tokenizer: Path | None = None) -> TokenAudit:
    """Audit what `run` has kept, with the tokenizer in folder `tokenizer`, or else the one of its model.

    Raises UserError where the run has no trajectories, or the tokenizer is not there or is another one.
    """
    mode = _mode(run)
    given, folder = _tokenizer(run, tokenizer)
    kept = run.trajectories()
    first = next(kept, None)
    if first is None:
        raise UserError(
            f"{run.path} has no trajectories to audit: train with tracking.trajectories above 0, or null for all of them."
        )
    codec = open_codec(folder)
    try:
        return audit((one for part in ((first,), kept) for one in part), codec, mode)
    except OtherTokeniser as problem:
        raise UserError(
            f"{problem}: {given} is not the one of {run.path}; name the folder that it began with: "
            f"rlsys audit tokens {run.path} --tokenizer DIR."
        ) from problem


def open_codec(folder: Path) -> Codec:
    """The tokenizer in `folder`. Raises UserError if it has no characters of tokens, or cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # Of a damaged file, whatever the libraries below stumble over.
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise UserError(f"The tokenizer in {folder} cannot be opened ({reason}); give a whole one.") from problem
    return Codec(tokenizer)


def _mode(run: RunFolder) -> TokenMode:
    given = section(run.config, "task").get("token_mode")
    if not isinstance(given, str) or given not in list(TokenMode):
        raise UserError(
            f"{run.path / 'config.yaml'} does not say task.token_mode, without which its tokens cannot be audited; restore it."
        )
    return TokenMode(given)


def _tokenizer(run: RunFolder, tokenizer: Path | None) -> tuple[str, Path]:
    """What was given, and the folder."""
    path = section(run.config, "model").get("path")
    given = f"model.path={path}" if tokenizer is None else f"--tokenizer {tokenizer}"
    folder = tokenizer or (Path(path) if isinstance(path, str) else None)
    if folder is None or not (folder / NEEDED).is_file():
        raise UserError(
            f"{given} of {run.path} has no {NEEDED} here, without which no text can be tokenised again; name a folder that "
            f"has it: rlsys audit tokens {run.path} --tokenizer DIR."
        )
    return given, folder
