"""Asks a search policy one question: the counterpart of Search-R1's `infer.py`.

    python examples/searchr1/infer.py --model_id outputs/<run>/hf --question "Who wrote the novel that Blade Runner is from?"

A retrieval server must run at `--search_url`. Without `--question`, Search-R1's own example is asked. `rlsys chat` does
the same and more.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import aclosing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.apps.chat.chat_settings import ChatOptions, settings_of
from rlsys.apps.chat.conversation import EpisodeEnded, Failed, ObservationAdded, TextPiece, opened
from rlsys.apps.cli.main import run_command
from rlsys.apps.evaluation.evaluation_inputs import engine_named, find_model
from rlsys.apps.running import run_to_end
from rlsys.errors import Interrupted, UserError
from rlsys.observe.samples import visible

QUESTION = (
    "Mike Barnett negotiated many contracts including which player that went on to become general manager of CSKA Moscow of "
    "the KHL?"
)


async def infer(given: argparse.Namespace) -> None:
    """Print the episode while it is generated. Raises UserError for a question that cannot be asked."""
    if not given.question.strip():
        raise UserError(
            "--question is empty: give one, or omit it for Search-R1's example.", code="empty", key="--question"
        )
    model = find_model(given.model_id, given.hf, f"--model_id {given.model_id}")
    wanted = ChatOptions(search_url=given.search_url, max_turns=given.max_turns, temperature=given.temperature)
    settings = settings_of(model, wanted)
    for note in settings.notes:
        print(note, file=sys.stderr)
    async with (
        opened(model, settings, engine_named(given.engine)) as chat,
        aclosing(chat.conversation.ask(given.question)) as events,
    ):
        async for event in events:
            match event:
                case TextPiece() | ObservationAdded():
                    print(visible(event.text), end="", flush=True)
                case EpisodeEnded():
                    print(f"\n\nAnswer: {visible(event.answer or 'none')} ({event.searches} searches)")
                case Failed():
                    assert event.code is not None  # Only the question can be invalid here.
                    raise UserError(event.reason, code=event.code, key=event.key)


def main() -> None:
    """Read the flags and ask."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model_id", type=Path, required=True, help="Hugging Face folder or Megatron checkpoint")
    add("--hf", type=Path, help="for a checkpoint: the Hugging Face folder that training started from")
    add("--question", default=QUESTION)
    add("--search_url", default="http://127.0.0.1:8000", help="URL of the retrieval server")
    add("--max_turns", type=int, help="maximum number of searches (default: as in training)")
    add("--temperature", type=float, default=0.7)
    add("--engine", default="transformers", help="transformers (the default), sglang or package.module.Class")
    given = parser.parse_args()
    # Escape characters that the terminal's encoding lacks.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        run_to_end(infer(given))
    except Interrupted:
        raise Interrupted("Ended.") from None


if __name__ == "__main__":
    run_command(main)
