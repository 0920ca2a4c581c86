"""Implements `rlsys convert`: converts, compares and describes Hugging Face folders and Megatron checkpoints."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from rlsys.apps.cli.options import print_pairs
from rlsys.errors import UserError

if TYPE_CHECKING:
    from rlsys.apps.convert.verify import Comparison
    from rlsys.weights.convert.conversion import ConversionResult
    from rlsys.weights.convert.model_folder import Info

_HELP = "Convert, compare and describe models. The formats are Hugging Face and Megatron."
app = typer.Typer(help=_HELP, no_args_is_help=True)

Out = Annotated[Path, Argument(help="Folder to write; it must not exist.")]
_MEGATRON = "Megatron checkpoint: .../global_step_N/actor, a folder of iter_*, or an iter_*."
Megatron = Annotated[Path, Argument(help=_MEGATRON)]
Dtype = Annotated[str | None, Option(help="float32, bfloat16 or float16; by default each tensor keeps its dtype.")]
ShardSize = Annotated[str | None, Option(help="Largest file size, such as 500MB; by default 5GB.")]
_PROCESSES = "Processes that write in parallel; by default one per core for a large model."
Processes = Annotated[int | None, Option(help=_PROCESSES)]
Config = Annotated[Path | None, Option(help="Hugging Face folder with the config of a Megatron checkpoint.")]
_FAMILY = "YAML file of a model family of your own, as in model.family."
OfFamily = Annotated[str | None, Option("--family", help=_FAMILY)]
_ORIGINAL = (
    "Original Hugging Face folder, for config and tokenizer; its weights are read only to merge adapters (LoRA)."
)
_ADAPTER = "Write the adapters (LoRA) alone, in PEFT's format, instead of merging them."
_VALUES = "Make a critic, with a zero value head if the model has none."
_LOGITS = "Compare logits too, if memory allows."


@app.command()
def mg2hf(
    src: Megatron,
    dst: Out,
    hf: Annotated[Path | None, Option(help=_ORIGINAL)] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    processes: Processes = None,
    family: OfFamily = None,
    adapter: Annotated[bool, Option("--adapter", help=_ADAPTER)] = False,
) -> None:
    """Convert Megatron to Hugging Face. An interrupted conversion continues."""
    with warnings.catch_warnings(action="ignore"):
        from rlsys.weights.convert.conversion import SHARD_BYTES, megatron_to_hf, megatron_to_peft

        if adapter:
            if hf is None:
                raise UserError("--adapter needs the frozen model: give --hf.", code="missing", key="--hf")
            for option, value in (("--shard-size", shard_size), ("--processes", processes)):
                if value is not None:
                    raise UserError(
                        f"{option} is {value}, but --adapter writes one file: leave out {option}.",
                        code="conflict",
                        key=option,
                    )
            nbytes = megatron_to_peft(src, dst, hf, family, dtype)
            typer.echo(f"{dst}: {nbytes / 1e6:.2f} MB of adapters")
            return
        with _bar("written") as show:
            shard_bytes = SHARD_BYTES if shard_size is None else parse_size(shard_size)
            outcome = megatron_to_hf(
                src, dst, hf, family=family, dtype=dtype, shard_bytes=shard_bytes, processes=processes, show=show
            )
    _report(outcome, dst)


@app.command()
def hf2mg(
    src: Annotated[Path, Argument(help="Hugging Face folder.")],
    dst: Out,
    tp: Annotated[
        int, Option(help="Tensor parallel size of the checkpoint's layout; it can be loaded with any other.")
    ] = 1,
    pp: Annotated[int, Option(help="Pipeline parallel size of the layout.")] = 1,
    pp_layers: Annotated[str | None, Option(help="Layers of each stage if uneven, such as 10,9,9.")] = None,
    ep: Annotated[int, Option(help="Expert parallel size of the layout.")] = 1,
    dtype: Dtype = None,
    values: Annotated[bool, Option("--values", help=_VALUES)] = False,
    processes: Processes = None,
    family: OfFamily = None,
) -> None:
    """Convert Hugging Face to Megatron. An interrupted conversion continues."""
    if pp_layers is not None and not re.fullmatch(r"\d+(,\d+)*", pp_layers):
        raise UserError(
            f"--pp-layers is {pp_layers}: give one number per stage, such as 10,9,9.",
            code="malformed",
            key="--pp-layers",
        )
    layers = None if pp_layers is None else [int(count) for count in pp_layers.split(",")]
    with warnings.catch_warnings(action="ignore"):
        from rlsys.config.schema import ParallelConfig
        from rlsys.weights.convert.conversion import hf_to_megatron

        parallel = ParallelConfig(tp=tp, pp=pp, pp_layers=layers, ep=ep)
        with _bar("written") as show:
            outcome = hf_to_megatron(
                src,
                dst,
                family=family,
                parallel=parallel,
                dtype=dtype,
                values=values,
                processes=processes,
                show=show,
            )
    _report(outcome, dst)


@app.command()
def verify(
    a: Annotated[Path, Argument(help="Hugging Face folder or Megatron checkpoint.")],
    b: Annotated[Path, Argument(help="Model to compare with, of either kind.")],
    hf: Config = None,
    family: OfFamily = None,
    logits: Annotated[bool, Option("--logits/--no-logits", help=_LOGITS)] = True,
) -> None:
    """Compare two models. Covers names, shapes, dtypes, checksums and logits. Exits with 1 if they differ."""
    with warnings.catch_warnings(action="ignore"):
        from transformers.utils.logging import disable_progress_bar

        from rlsys.apps.convert.verify import verify as compare

        disable_progress_bar()
        with _bar("read") as show:
            verdict = compare(a, b, hf=hf, family=family, logits=logits, show=show)
    _print_verdict(verdict)
    raise typer.Exit(0 if verdict.same else 1)


@app.command()
def info(
    src: Annotated[Path, Argument(help="Hugging Face folder or Megatron checkpoint.")],
    hf: Config = None,
    family: OfFamily = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a model. Shows format, step, layout, architecture, size and dtypes."""
    with warnings.catch_warnings(action="ignore"):
        from rlsys.weights.convert.model_folder import info as look

        found = look(src, hf, family)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _print_info(found)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500 MB or 1.5GiB. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(I?))?B?", text.strip().upper())
    number, prefix, binary = found.groups() if found else ("0", "", "")
    size = int(float(number) * (1024 if binary else 1000) ** " KMG".index(prefix or " "))
    if not size:
        raise UserError(
            f"--shard-size is {text}: give a size such as 500MB or 5GB.", code="malformed", key="--shard-size"
        )
    return size


@contextmanager
def _bar(verb: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback that shows a progress bar of bytes; None outside a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        # Started late, so that the speed excludes bytes of an earlier, interrupted command.
        task = bar.add_task(verb, total=None, start=False)

        def show(done: int, total: int) -> None:
            if not bar.tasks[0].started:
                bar.start_task(task)
            bar.update(task, completed=done, total=total)

        yield show


def _report(outcome: ConversionResult, out: Path) -> None:
    for note in outcome.notes:
        typer.echo(note, err=True)
    kept = f", {outcome.kept} of them kept from an earlier attempt" if outcome.kept else ""
    typer.echo(f"{out}: {outcome.nbytes / 1e9:.2f} GB in {outcome.files} file{'s' * (outcome.files != 1)}{kept}")


def _print_verdict(verdict: Comparison) -> None:
    if verdict.differences:
        table = Table()
        for heading in ("tensor", "differs in", "first", "second"):
            table.add_column(heading, overflow="fold")  # Fold names instead of truncating them.
        for difference in verdict.differences[:20]:
            table.add_row(Text(difference.name), difference.what, Text(difference.first), Text(difference.second))
        Console().print(table)
        if (left := len(verdict.differences) - 20) > 0:
            typer.echo(f"and {left} more")
    typer.echo(
        f"tensors: {verdict.tensors - len(verdict.differences)} of {verdict.tensors} identical in name, shape, "
        f"dtype and bytes ({verdict.nbytes / 1e9:.2f} GB)"
    )
    if verdict.note:
        typer.echo(verdict.note)
    if logits := verdict.logits:
        typer.echo(
            f"logits: {'the same' if logits.same else 'DIFFERENT'}, largest difference {logits.difference:.2g} "
            f"(largest logit {logits.largest:.3g}); same most likely token at {logits.agreement:.1%} of "
            f"{logits.positions} positions"
        )


def _print_info(found: Info) -> None:
    rows = {
        "folder": found.folder,
        "format": found.format,
        "step": "unknown" if found.step is None else str(found.step),
        "layout": found.layout,
        "kind": "critic" if found.critic else "policy",
        "parameters": f"{found.parameters:,}",
        "weights": f"{found.nbytes / 1e9:.2f} GB of {found.folder_bytes / 1e9:.2f} GB in the folder",
        "dtypes": ", ".join(f"{name} ({count:,})" for name, count in found.dtypes.items()),
    }
    architecture = {"architecture": "unknown: give --hf"} if found.architecture is None else found.architecture
    rows |= {key: str(value) for key, value in architecture.items()}
    print_pairs(rows | {"also": ", ".join(found.also)})
