"""Checks and measures rlsys on one GPU: kernels, weight transfer, training, the engine, and their agreement.

    python -m bench.gpu                             # one H100 or H200, at most an hour; 40 GB of disk
    python -m bench.gpu --only logprobs,hash        # some parts
    python -m bench.gpu --small                     # smoke test: a tiny model, with or without a GPU

    python -m bench.gpu --bundle DIR [--only logprobs,hash] [--has torch,triton] [--piece-mib 60]

Every part runs in a process of its own with a time limit; when that process ends, all that it started are ended too. A
part that needs something that the machine lacks is skipped with the reason. If a part fails, the others still run. The
model has random weights: nothing is downloaded.

After each part, its figures are written to `outputs/bench/gpu.json` (`gpu-small.json` with --small), with the machine,
the versions and the commit; its messages are in `outputs/bench/gpu/PART.log`. Parts that were not chosen keep their
earlier results if these have the same machine, versions and commit.

`--bundle` packs the packages that the parts need, for a machine without network, in pieces; see `bench.gpu.bundle`.

The exit status is 1 if a part failed or a check was not met, and 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu import bundle
from bench.gpu.figures import PROJECT, SCALES, Figure, Outcome, work_of
from bench.gpu.part import COMMON, MODEL_LIMIT_S, PARTS, lacks, read
from rlsys.cluster.local_ray import adopt_orphans, descendants, end
from rlsys.config.schema import Device
from rlsys.errors import UserError, with_code
from rlsys.files import parse_json, write_atomically
from rlsys.observe.environment import commit_of, environment, version_of

RESULTS = {"full": Path("outputs/bench/gpu.json"), "small": Path("outputs/bench/gpu-small.json")}
"""Scale -> result file. The messages of the parts are in the folder of the same name."""
WIDTH = 140
"""Columns of the printed table."""
VARIABLES = {
    Device.cpu: {"OMP_NUM_THREADS": "1"},
    Device.gpu: {"OMP_NUM_THREADS": "8", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},
}
"""Environment of a part, unless the caller's has other values: a worker's in a run (`rlsys.cluster.worker_group`)."""
_OF_MACHINE = ("device", "versions", "commit", "changed")
"""Keys of a report that must be equal for its results to be kept."""


def main() -> None:
    """Run the command line. Exits with the status described above."""
    options = _options()
    try:
        chosen = _names("--only", options.only, PARTS) or list(PARTS)
        if options.bundle is None:
            device = _device(options.small)
            # Ends the part that runs, as an interrupt does.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            sys.exit(measure(chosen, device, options.small))
        bundle.make(options.bundle, chosen, options.has, options.piece_mib)
    except UserError as problem:
        print(with_code(problem, problem.code), file=sys.stderr)
        sys.exit(2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="use a tiny model; runs on a CPU if there is no GPU")
    parser.add_argument(
        "--only", "--parts", default="", metavar="A,B", help=f"parts to run or to pack: {','.join(PARTS)}"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="pack the packages of the parts, in the new folder DIR"
    )
    parser.add_argument("--has", default="", metavar="A,B", help="packages that the other machine has: not packed")
    parser.add_argument(
        "--piece-mib", type=int, default=1024, metavar="N", help="size of the pieces of a bundle, in MiB"
    )
    return parser.parse_args()


def _names(flag: str, given: str, known: Mapping[str, Any]) -> list[str]:
    """Return the names in the list `given` in the order of `known`. Raises UserError for an unknown name."""
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            raise UserError(f'{flag}: "{name}" is none of {", ".join(known)}.', code="unknown", key=flag)
    return [name for name in known if name in names]


def measure(chosen: Sequence[str], device: Device, small: bool) -> int:
    """Run the parts `chosen`, print the table and write the result file; return the exit status."""
    scale = "small" if small else "full"
    commit, changed = commit_of(PROJECT)
    versions, result = environment(), RESULTS[scale]
    described = {"device": versions.get("gpus", "no GPU"), "versions": versions, "commit": commit, "changed": changed}
    described["work"] = work_of(SCALES[scale])
    outcomes = _kept(result, described)
    adopt_orphans()
    logs = result.with_suffix("").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-") as scratch:
        for name, outcome in _run(chosen, device, scale, Path(scratch), logs):
            outcomes[name] = outcome
            kept = {one: asdict(outcomes[one]) for one in PARTS if one in outcomes}
            write_atomically(result, json.dumps({**described, "parts": kept}, indent=2) + "\n")
            print(f"{name}: {_told(outcome)}", flush=True)
    seconds = sum(outcomes[name].seconds for name in chosen)
    title = f"{described['device']}, {scale}, {seconds:.0f} s; written to {result}"
    show({name: outcomes[name] for name in chosen}, title)
    if all(outcomes[name].skipped for name in chosen):
        return 2
    return int(any(outcomes[name].failed for name in chosen))


def _device(small: bool) -> Device:
    """Return the device to measure. Raises UserError without torch, and without a GPU unless `small`."""
    missing = [name for name in COMMON if version_of(name) is None]
    if missing:
        fix = "install them, or pack them with --bundle on a machine that has a network"
        raise UserError(f"Packages are missing: {', '.join(missing)}; {fix}.", code="not_installed", key=missing[0])
    import torch

    if torch.cuda.is_available():
        return Device.gpu
    if small:
        return Device.cpu
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    raise UserError(
        f"torch {torch.__version__}, {built}, finds no CUDA device: run on a machine with an NVIDIA GPU and a driver, "
        "or use --small for a smoke test on the CPU.",
        code="not_found",
        key="CUDA device",
    )


def _kept(result: Path, described: Mapping[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes in the file `result` if it is `described` alike; none if it is not there or damaged."""
    try:
        before = parse_json(result.read_bytes())
        if any(before[key] != described[key] for key in _OF_MACHINE):
            return {}
        found = before["parts"].items()
        return {
            name: Outcome(**one | {"figures": [Figure(**figure) for figure in one["figures"]]}) for name, one in found
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _run(chosen: Sequence[str], device: Device, scale: str, scratch: Path, logs: Path) -> Iterator[tuple[str, Outcome]]:
    """Run the parts `chosen`; yield the name and outcome of each when it ends. Writes the model before the first part
    that needs it."""
    model = scratch / "model"
    unwritten: str | None = None
    for name in chosen:
        part, started = PARTS[name], time.perf_counter()
        outcome = Outcome(skipped=lacks(part, device, version_of))
        if not outcome.skipped and part.needs_model and unwritten is None:
            command = ["-m", "bench.gpu.random_model", str(SCALES[scale].shape), str(model), str(device)]
            written = run_part(command, MODEL_LIMIT_S, scratch / "none", logs / "model.log", VARIABLES[device])
            unwritten = written.failed and f"The model with random weights was not written: {written.failed}"
        if not outcome.skipped and part.needs_model and unwritten:
            outcome = Outcome(failed=unwritten)
        elif not outcome.skipped:
            output = scratch / f"{name}.jsonl"
            command = part_command(name, device, scale, model, output)
            outcome = run_part(command, part.limit_s, output, logs / f"{name}.log", VARIABLES[device])
        outcome.seconds = round(time.perf_counter() - started, 1)
        yield name, outcome


def part_command(name: str, device: Device, scale: str, model: Path, output: Path) -> list[str]:
    """Return the arguments with which Python runs a part."""
    return ["-m", "bench.gpu.part", name, str(device), scale, str(model), str(output)]


def run_part(command: Sequence[str], limit_s: float, output: Path, log: Path, variables: Mapping[str, str]) -> Outcome:
    """Run Python with the arguments `command`, then end all processes that it left behind.

    They could keep the next part from using the GPU. Their messages go to `log`; the figures come from the file
    `output`. `variables` are its environment's defaults. Call `adopt_orphans` first.
    """
    before = {process.pid for process in descendants()}
    failed = ""
    with log.open("w") as messages:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=PROJECT,
            env={**variables, **os.environ},
            stdout=messages,
            stderr=subprocess.STDOUT,
        )
        try:
            if status := process.wait(limit_s):
                failed = f"it ended with status {status}; see {log}"
        except subprocess.TimeoutExpired:
            failed = f"it was ended after {limit_s:g} s; see {log}"
        finally:
            end(each for each in descendants() if each.pid not in before)
    figures, last = read(output)
    if output.is_file() and not (last or failed):
        failed = f"it ended before its last figure; see {log}"
    outcome = Outcome(figures, skipped=last.get("skipped", ""), failed=last.get("failed", failed))
    if outcome.broken and not outcome.failed:
        outcome.failed = f"not met: {', '.join(outcome.broken)}"
    return outcome


def _told(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"skipped, {outcome.skipped}"
    kind = f"FAILED, {outcome.failed}" if outcome.failed else "measured"
    return f"{kind} ({len(outcome.figures)} figures, {outcome.seconds:g} s)"


def rows(outcomes: Mapping[str, Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table: part, figure, value, comparison, target, result."""
    for name, outcome in outcomes.items():
        for one in outcome.figures:
            value = one.value if isinstance(one.value, str) else f"{one.value:,.4g} {one.unit}".strip()
            against = "" if one.ratio is None else f"{one.ratio:.3g} x {one.baseline}"
            result = {None: "", True: "met", False: "FAILED" if one.required else "missed"}[one.met]
            yield name, one.name, value, against, one.target, result
        if outcome.failed:
            yield name, outcome.failed, "", "", "", "FAILED"
        elif outcome.skipped:
            yield name, outcome.skipped, "", "", "", "skipped"


def show(outcomes: Mapping[str, Outcome], title: str) -> None:
    """Print the table of `outcomes`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("part", "figure", "value", "comparison", "target", "result"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for row in rows(outcomes):
        table.add_row(*row)
    Console(width=WIDTH, markup=False).print(table)


if __name__ == "__main__":
    main()
