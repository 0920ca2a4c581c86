"""The whole of rlsys, small: world, index, ceiling, training, conversion, check, report.

Run `make demo`, or `python -m examples.searchr1.tiny.demo [setting=value ...]` from the project's root.
The world and its index are made once and used again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from examples.searchr1.tiny.oracle import Ceiling, measure_ceiling
from examples.searchr1.tiny.world import WorldSpec, build_world, write_world
from rlsys.cli.convert import convert
from rlsys.cli.evaluate import ask_heldout
from rlsys.cli.main import run_command
from rlsys.cli.running import run_to_end
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.config.validate import validate
from rlsys.data.rows import read_questions
from rlsys.errors import RunError
from rlsys.observe.summary import write_summary
from rlsys.observe.table import render_summary
from rlsys.record import new_run_dir
from rlsys.search.client import SearchClient
from rlsys.search.index.make import make_index
from rlsys.search.serving import serving
from rlsys.train import train

CONFIG = "searchr1_tiny_cpu"
WORLD = Path("data/tiny_world")


def main(overrides: Sequence[str]) -> None:
    """Do it all, in order."""
    disable_progress_bar()
    console = Console()
    prepare_world(console)
    config = load_config(CONFIG, overrides)
    validate(config)
    run_dir = new_run_dir(config)
    console.print(f"[bold]Training[/]; everything goes to {run_dir}", highlight=False)
    with serving(config.search, config.cluster.threads, run_dir / "logs") as search:
        search.wait_healthy()
        served = replace(config, search=search.search)
        ceiling = asyncio.run(find_ceiling(served))
        console.print(
            f"the scripted policy answers {ceiling.oracle_em:.3f} of the held-out questions; "
            f"search finds the passage it needs in {ceiling.recall_at_3:.3f} of its queries",
            highlight=False,
        )
        summary = run_to_end(train(served, run_dir))
        summary |= {"oracle_em": ceiling.oracle_em, "recall_at_3": ceiling.recall_at_3}
        summary |= convert_and_check(served, run_dir, summary["checkpoint"], console)
    write_summary(run_dir / "summary.json", summary)
    render_summary(summary, console)
    console.print(f"The run is in {run_dir}: summary.json, curves.png, samples, trace.json.", highlight=False)


def prepare_world(console: Console) -> None:
    """Write the questions and passages; encode the passages, unless these very ones are encoded already."""
    console.print("[bold]World[/]: questions and passages from GeoNames", highlight=False)
    spec = WorldSpec()
    write_world(build_world(spec), spec, WORLD)
    console.print("[bold]Index[/]: encoding the passages, unless that is done", highlight=False)
    make_index("dense", WORLD / "corpus.jsonl", WORLD / "index")


async def find_ceiling(config: RunConfig) -> Ceiling:
    """What the scripted policy reaches with the very server that the run uses."""
    assert config.search.url is not None
    questions = read_questions(config.task.eval_path)
    async with SearchClient(config.search.url, topk=config.search.topk) as client:

        async def retrieve(query: str) -> list[str]:
            result = await client.search(query)
            if result.error:
                raise RunError(f"the search server did not answer {query!r}: {result.error}")
            return [passage.contents for passage in result.passages]

        return await measure_ceiling(questions, retrieve)


def convert_and_check(config: RunConfig, run_dir: Path, checkpoint: str, console: Console) -> dict[str, Any]:
    """Turn the checkpoint into a Hugging Face folder, and ask it what the engine was asked last."""
    started = time.perf_counter()
    hf = run_dir / "hf"
    convert(Path(checkpoint), hf, Path(config.model.path))
    console.print(
        f"[bold]Converted[/] to {hf}; asking plain transformers the same questions", highlight=False
    )
    converted = replace(config, model=replace(config.model, path=str(hf)))
    answers = run_to_end(ask_heldout(converted, "transformers"))
    last = max((run_dir / "evaluations").glob("step_*.jsonl"))
    engine = {row["uid"]: row["answer"] for row in map(json.loads, last.open(encoding="utf-8"))}
    same = [answer == engine[uid] for uid, answer in answers.answers().items()]
    return {
        "hf_engine_agreement": sum(same) / len(same),
        "hf_em": answers.em,
        "convert_and_check_s": time.perf_counter() - started,
    }


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
