"""Renders sample episodes as plain text that is safe to print in a terminal.

Model output and retrieved pages are untrusted: control characters, escape sequences and characters that reorder text
are spelled out. Only line breaks and tabs are kept.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory, Turn
from rlsys.files import write_atomically

UNSAFE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories without a glyph: controls, bidi marks, surrogates, private and unassigned characters, and
separators of lines and paragraphs."""
WIDTH = 100


def visible(text: str) -> str:
    r"""Return `text` with every character that a terminal could act on spelled out, such as \x1b for escape."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in UNSAFE_CATEGORIES else _spelled(char)
        for char in text
    )


def render_sample(question: Question, trajectory: Trajectory, reward: float) -> str:
    """Return the episode as text: header, prompt, then generated text and observation of each turn."""
    trained = int(trajectory.loss_mask.sum())
    response = len(trajectory.tokens) - trajectory.prompt_length
    calls = f" and {trajectory.tool_calls} tool calls" if trajectory.tool_calls else ""
    header = {
        "question": f"{question.uid} (sample {trajectory.sample})",
        "gold answers": " | ".join(question.answers),
        "answer": "none" if trajectory.answer is None else trajectory.answer.strip(),
        "reward": f"{reward:g}",
        "finish": f"{trajectory.finish.value} after {trajectory.searches} searches{calls}",
        "tokens": f"{trajectory.prompt_length} prompt, {trained} trained, {response - trained} masked",
        "trained at": _trained_runs(trajectory),
        "re-tokenised": f"{trajectory.tokens_differing} trained tokens differ from what was sampled",
    }
    lines = [f"{name + ':':<14}{_one_line(value)}" for name, value in header.items()]
    lines += ["", _rule("prompt (masked)"), *_quoted(question.prompt)]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines += _turn_lines(number, turn)
    return "\n".join(lines) + "\n"


def write_samples(samples: Iterable[tuple[Question, Trajectory, float]], directory: Path) -> None:
    """Write each sample, rendered by `render_sample`, to `directory/NN.txt`, starting at 00."""
    for number, sample in enumerate(samples):
        write_atomically(directory / f"{number:02d}.txt", render_sample(*sample))


def _turn_lines(number: int, turn: Turn) -> list[str]:
    cached = f"{turn.cached_tokens}/{turn.prompt_tokens} prompt tokens cached"
    title = f"turn {number}: generated, {turn.generated_tokens} tokens, {turn.generate_s:.2f} s, {cached}"
    lines = ["", _rule(title), *_quoted(turn.text)]
    if turn.tool_error:
        lines += ["", _rule(f"turn {number}: {turn.tool or 'search'} failed: {_one_line(turn.tool_error)}")]
    if turn.observation:
        title = f"turn {number}: observation after {turn.tool or turn.action.value} (masked), {turn.tool_s:.2f} s"
        lines += ["", _rule(title), *_quoted(turn.observation, mark="| ")]
    return lines


def _trained_runs(trajectory: Trajectory) -> str:
    """List the trained token ranges with the weight versions that sampled them."""
    padded = np.concatenate([[False], trajectory.loss_mask, [False]])
    edges: NDArray[np.int64] = np.flatnonzero(padded[1:] != padded[:-1])
    runs = []
    for start, stop in edges.reshape(-1, 2).tolist():
        sampled = sorted({int(version) for version in trajectory.versions[start:stop] if version >= 0})
        runs.append(f"[{start}, {stop}) " + ("version " + ", ".join(map(str, sampled)) if sampled else "not sampled"))
    return "; ".join(runs) or "nothing"


def _rule(title: str) -> str:
    return f"---- {title} ".ljust(WIDTH, "-")


def _quoted(text: str, mark: str = "") -> list[str]:
    """Indent each line, so that no text looks like a heading."""
    return [f"  {mark}{line}" for line in visible(text).strip("\n").split("\n")]


def _one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
