"""Preflight: checks everything that a run needs before it starts, and reports all failures at once.

Contract: the checks leave no process behind, read only the headers of weight files, and always terminate. Keys with a
config problem are not checked again, so a missing path is reported once.

The result is a list of findings, shown as a table or as plain data (`--json`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from rlsys.cluster.local_ray import RAY_PORT, ray_parent
from rlsys.cluster.planning.host import SHARED_BYTES
from rlsys.cluster.planning.memory import GIB
from rlsys.cluster.planning.placement import USABLE, fullest_device, launch_problems, memory_fix, parse_placement
from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.preflight.machine import Gpus, RayCluster, SearchAnswer, ThisMachine, Unseen
from rlsys.config.derived import (
    chosen_layers,
    has_critic,
    heldout_files,
    megatron_groups,
    needs_server,
    of_teacher,
    train_files,
)
from rlsys.config.schema import Attention, Device, Layers, Mode, RunConfig, SearchConfig, SglangConfig, SyncMode
from rlsys.data.question import Question, read_questions
from rlsys.errors import UserError
from rlsys.files import SHARED_MEMORY
from rlsys.observe.environment import INSTALL, unmet_requirements
from rlsys.rollout.kinds import engine_class
from rlsys.search.address import DEFAULT_PORT
from rlsys.search.index.folder import read_manifest
from rlsys.weights.hf_io import INDEX, HfReader
from rlsys.weights.sockets import INTERFACE_VARIABLES
from rlsys.weights.weight_map import WeightMap, read_architecture

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements"
_SHOWN = 4  # Packages listed in one finding.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # CUDA major version -> oldest driver major version that supports it.
_RESERVED_GIB = 1.0  # Memory of a GPU that the driver and a desktop may occupy.
_FULL = 0.95  # Share of a file system in use at which Ray stops spilling objects to it.
_LOGS_GIB = 1.0  # Space for logs, metrics and Ray's session.
_BUCKET_FILES = 3  # Maximum number of weight files on disk at a time with cluster.sync_mode=disk.
_RESOURCE = {Device.cpu: "CPU", Device.gpu: "GPU"}
RAY, MODEL, SEARCH_INDEX, SERVER = "Ray", "model.path", "search.index", "search server"
TEACHER = "algorithm.teacher.model"
_AGAIN = "get the model again, such as with `hf download NAME --local-dir FOLDER`"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_QUESTION = "Who wrote Hamlet?"
_STYLE = {"ok": "green", "wrong": "bold red", "note": "yellow", "unknown": "cyan"}
_NARROW = 56  # Terminal width below which findings are printed as lines instead of a table.


class FindingState(StrEnum):
    """Result of one check."""

    ok = "ok"
    wrong = "wrong"  # The run would fail.
    note = "note"  # Information; the run can start.
    unknown = "unknown"  # This machine cannot check it.


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: state, subject, observation and fix."""

    state: FindingState
    what: str
    found: str
    fix: str = ""  # Remedy; set for every `wrong` finding unless `found` already includes it.


ok = partial(Finding, FindingState.ok)
wrong = partial(Finding, FindingState.wrong)
note = partial(Finding, FindingState.note)
unknown = partial(Finding, FindingState.unknown)


def _ok_or_wrong(good: bool, what: str, found: str, fix: str) -> Finding:
    return ok(what, found) if good else wrong(what, found, fix)


def is_right(findings: Iterable[Finding]) -> bool:
    """True if no check failed; unknown results do not count as failures."""
    return all(finding.state is not FindingState.wrong for finding in findings)


def as_data(name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Convert findings to plain data, as `--json` prints them."""
    rows = [{key: str(getattr(finding, key)) for key in ("what", "state", "found", "fix")} for finding in findings]
    return {"config": name, "right": is_right(findings), "findings": rows}


def show(name: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a table with one row per finding, and the verdict; a fix is below its observation."""
    table = Table(title=f"rlsys doctor --for {name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what", overflow="fold", max_width=22)
    table.add_column("found", overflow="fold")
    for finding in findings:
        mark = Text(str(finding.state), _STYLE[finding.state])
        told = Text(finding.found)
        if finding.fix:
            told.append(f"\n-> {finding.fix}", "bold")
        if console.width < _NARROW:
            console.print(mark, finding.what, highlight=False)
            console.print(told)
        table.add_row(mark, Text(finding.what), told)
    if console.width >= _NARROW:
        console.print(table)
    console.print(verdict(name, findings), markup=False, highlight=False)


def verdict(name: str, findings: Sequence[Finding]) -> str:
    """Summarise the findings in one sentence."""
    wrong = [finding.what for finding in findings if finding.state is FindingState.wrong]
    hidden = sum(finding.state is FindingState.unknown for finding in findings)
    if wrong:
        things = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
        return f"{name} cannot run here yet; fix {things}: {', '.join(dict.fromkeys(wrong))}."
    if hidden:
        checks = "1 check was" if hidden == 1 else f"{hidden} checks were"
        return f"No problem found for {name}; {checks} not possible on this machine."
    return f"{name} can run here."


def examine(
    config: RunConfig, known: Sequence[UserError], machine: ThisMachine, *, launched: bool = False
) -> Iterator[Finding]:
    """Yield all findings for a run of `config` that is started on `machine`, in table order.

    `known` are the problems of the config itself. `launched` means that `rlsys launch` assembles the machines and starts
    the search servers before the run.
    """
    problems = [*known, *(() if launched else launch_problems(config))]
    yield from _problem_findings(problems) or [ok("config", f"{config.name}: its settings are consistent")]
    bad = {problem.key for problem in problems}
    ranks, address = _ranks(config), config.cluster.address
    ray = None if address is None else machine.ray(address)
    machines = max(config.cluster.nodes, len(ray.nodes) if isinstance(ray, RayCluster) else 1)
    yield from _version_findings(config, machine.version)
    yield from _device_findings(config, _devices_here(config, ranks, ray, machine), machine)
    yield from _interface_findings(machine)
    if "cluster.address" not in bad:
        yield from _ray_findings(config, ranks, ray, machine)
    yield from _room_findings(config, _plan(config), machine)
    if MODEL not in bad:
        yield from model_findings(Path(config.model.path), config.model.family)
    if (taught := of_teacher(config)) is not None and TEACHER not in bad:
        yield from model_findings(Path(taught.model.path), taught.model.family, TEACHER)
    question = ""
    for _, key, path in (*train_files(config.task), *heldout_files(config.task)):
        if key not in bad:
            finding, first = data_findings(key, Path(path))
            question = question or (first.text if first else "")
            yield finding
    if not any(key.startswith("search.") for key in bad):
        yield from search_findings(config, question, machines, machine)
    if machines > 1 and not launched:  # `rlsys launch` runs the checks on every machine.
        yield unknown(
            f"{machines - 1} other machine{'s' if machines > 2 else ''}",
            "GPUs, driver, versions, disk and the paths of model and output_dir are not checked there",
            "run the same command on each",
        )


def _problem_findings(problems: Sequence[UserError]) -> list[Finding]:
    return [wrong(problem.key, str(problem)) for problem in problems]


def _ranks(config: RunConfig) -> int:
    """Return the number of devices that the run needs; 1 if its placement is invalid."""
    try:
        placed = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    except UserError:
        return 1
    return len({rank for group in (*megatron_groups(config), "rollout") for rank in placed[group]})


def _plan(config: RunConfig) -> dict[str, Any] | None:
    """Return `make_plan(config)`, or None if the config is too broken for it; its problems are reported separately."""
    try:
        return make_plan(config)
    except (UserError, ValueError, ArithmeticError, LookupError):
        return None


def _version_findings(config: RunConfig, version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compare installed versions with the versions that rlsys needs and the versions in its tests (requirements/)."""
    if not (REQUIREMENTS / "base.txt").is_file():
        yield unknown("versions", f"{REQUIREMENTS} does not exist, so the versions cannot be compared")
        return
    device = config.cluster.device
    files = [REQUIREMENTS / f"{name}.txt" for name in (("gpu",) if device is Device.gpu else ("cpu", "cpu-nodeps"))]
    profile, fix = f"requirements/{files[0].name}", INSTALL[device]
    needed = [
        *read_requirements(REQUIREMENTS / "base.txt"),
        *map(Requirement, ("torch", *_engine_packages(config))),
    ]
    problems = [
        f"{each.name} is not installed" if found is None else f"{each.name} {found} is not {each.specifier}"
        for each, found in _unmet(needed, version)
    ]
    all_there = f"all {len(needed)} packages that rlsys needs are installed"
    yield _ok_or_wrong(not problems, "versions", "; ".join(problems) or all_there, fix)
    # Other versions than the profile's pins may work, but are not tested.
    pins = [pin for file in files for pin in read_requirements(file)]
    other = [
        f"no {pin.name}" if found is None else f"{pin.name} {found} instead of {str(pin.specifier).removeprefix('==')}"
        for pin, found in _unmet(pins, version)
    ]
    if not other:
        yield ok("tested versions", f"all {len(pins)} of {profile}")
        return
    shown = ", ".join(other[:_SHOWN]) + (f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else "")
    told = f"{len(other)} of {len(pins)} packages differ from {profile}: {shown}"
    yield note("tested versions", told, fix)


def _engine_packages(config: RunConfig) -> Sequence[str]:
    """Return the requirements of the engine; none for a class that is no engine, which is reported separately."""
    try:
        return engine_class(config.rollout.engine).packages
    except UserError:
        return ()


def read_requirements(file: Path) -> list[Requirement]:
    """Return the requirements in `file` that apply to this system; skips options and comments."""
    lines = (line.split(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    needed = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return [each for each in needed if each.marker is None or each.marker.evaluate()]


def _unmet(needed: Sequence[Requirement], version: Callable[[str], str | None]) -> list[tuple[Requirement, str | None]]:
    """Return the requirements that are not met, each with the installed version or None."""
    there = [(each, version(each.name)) for each in needed]
    return [(each, has) for each, has in there if has is None or not each.specifier.contains(has, prereleases=True)]


def _devices_here(config: RunConfig, ranks: int, ray: RayCluster | Unseen | None, machine: ThisMachine) -> int:
    """Return how many of the run's `ranks` devices this machine provides."""
    cluster, here = config.cluster, float(ranks)
    if isinstance(ray, RayCluster):
        own = {address for addresses in machine.interfaces().values() for address in addresses}
        here = sum(node.resources.get(_RESOURCE[cluster.device], 0) for node in ray.nodes if node.address in own)
    elif cluster.nodes > 1 and cluster.devices_per_node is not None:
        here = cluster.devices_per_node
    return min(ranks, int(here))


def _device_findings(config: RunConfig, wanted: int, machine: ThisMachine) -> Iterator[Finding]:
    """Check the `wanted` devices of this machine, and the software that uses them."""
    on_gpus = config.cluster.device is Device.gpu
    if on_gpus and not wanted:
        yield unknown(
            "GPUs", "this machine provides none for the run, and those of other machines are not visible from here"
        )
        return
    if on_gpus:
        # Before `capabilities`, because torch itself allocates GPU memory when it looks for devices.
        yield from _gpu_findings(config, wanted, machine)
    problems = list(unmet_requirements(config, machine.capabilities))
    yield from _problem_findings(problems) or [ok("capabilities", "everything that the settings need is installed")]
    if on_gpus:
        yield from _cudnn_findings(config, machine)
        yield from _memory_saver_findings(config, machine)
    if on_gpus and machine.capabilities.nccl:
        reach = "connections between GPUs and machines are only tested when the run starts"
        yield note("NCCL", f"in torch {machine.capabilities.torch}; {reach}")


def _gpu_findings(config: RunConfig, wanted: int, machine: ThisMachine) -> Iterator[Finding]:
    """Check number, driver, memory and current use of this machine's GPUs.

    Compares memory with the plan's estimate for the fullest device, made with the GPUs of this machine.
    """
    try:
        seen = machine.gpus()
    except Unseen as problem:
        yield wrong("GPUs", str(problem), "run on a machine with NVIDIA GPUs and their driver")
        return
    names = ", ".join(sorted({card.name for card in seen.cards}))
    found = f"{len(seen.cards)} of {wanted}" + (f": {names}" if names else "")
    fewer = "place the groups on fewer (cluster.placement), check CUDA_VISIBLE_DEVICES, or use a machine with more GPUs"
    yield _ok_or_wrong(len(seen.cards) >= wanted, "GPUs", found, fewer)
    # Only now, because torch allocates GPU memory when it looks for devices.
    here = machine.capabilities
    yield _driver(seen.driver, here.cuda)
    if not seen.cards:
        return
    # Plan with the actual GPU memory.
    smallest = min(card.total_gib for card in seen.cards)
    real = replace(config, cluster=replace(config.cluster, device_memory_gib=smallest))
    if (plan := _plan(real)) is not None:
        groups, needed = fullest_device(real, plan)
        yield _gpu_memory(config, groups, needed, smallest)
        yield from _used_gpus(seen, needed)


def _cudnn_findings(config: RunConfig, machine: ThisMachine) -> Iterator[Finding]:
    """Check that Transformer Engine's attention would load only torch's cuDNN.

    Libraries of different cuDNN versions do not work together.
    """
    uses_cudnn = config.model.attention in (Attention.auto, Attention.fused)
    if not uses_cudnn or chosen_layers(config) is not Layers.te or machine.capabilities.transformer_engine is None:
        return
    try:
        foreign = machine.foreign_cudnn()
    except Unseen as problem:
        yield unknown("cuDNN", str(problem))
        return
    shown = ", ".join(map(str, foreign[:_SHOWN])) + (
        f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
    )
    found = f"that of torch would load libraries of another version: {shown}" if foreign else "only that of torch"
    fix = "take their folder out of LD_LIBRARY_PATH or uninstall that cuDNN, or set model.attention=flash"
    yield _ok_or_wrong(not foreign, "cuDNN", found, fix)


def _memory_saver_findings(config: RunConfig, machine: ThisMachine) -> Iterator[Finding]:
    """Check that the processes of an engine that sleeps start with SGLang's memory saver, if it is installed."""
    sleeps = config.cluster.mode is Mode.colocated and isinstance(config.rollout.engine, SglangConfig)
    here = machine.capabilities
    if sleeps and here.cuda_devices and here.torch_memory_saver is not None:
        failure = machine.memory_saver_failure()
        yield _ok_or_wrong(not failure, "memory saver", failure or "a process starts with it", INSTALL[Device.gpu])


def _driver(driver: str, cuda: str | None) -> Finding:
    what = "CUDA driver"
    if cuda is None:
        return wrong(what, f"{driver}, and torch is built without CUDA", "install torch as requirements/gpu.txt says")
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is None:
        return unknown(what, f"{driver}; rlsys has no minimum driver for CUDA {cuda}", "see NVIDIA's release notes")
    if int(driver.split(".")[0]) < oldest:
        old = f"{driver} is too old for torch's CUDA {cuda}, which needs {oldest}"
        return wrong(what, old, f"install driver {oldest} or newer, or torch built for an older CUDA")
    return ok(what, f"{driver}, torch is built for CUDA {cuda}")


def _gpu_memory(config: RunConfig, names: Sequence[str], needed: float, card_gib: float) -> Finding:
    """Check that the groups `names` fit on the smallest GPU."""
    stated_gib = config.cluster.device_memory_gib
    found = f"{' + '.join(names)} need about {needed:.1f} of {card_gib:.1f} GiB of a GPU"
    if stated_gib is not None and abs(stated_gib - card_gib) > (1 - USABLE) * stated_gib:
        found += f" (but cluster.device_memory_gib={stated_gib:g})"
    if needed <= card_gib * USABLE:
        return ok("GPU memory", found)
    return wrong("GPU memory", f"{found}; the run can use {USABLE:.0%} of a GPU", memory_fix(config, names))


def _used_gpus(seen: Gpus, needed: float) -> Iterator[Finding]:
    """Check that memory used by other processes leaves `needed` GiB on every GPU."""
    taken = [card for card in seen.cards if card.used_gib > _RESERVED_GIB]
    if not taken:
        yield ok("GPUs in use", "no other process uses them")
    for card in taken:
        who = ", ".join(
            f"{process.name} (process {process.pid}, {process.used_gib:.1f} GiB)"
            for process in seen.processes
            if process.uuid == card.uuid
        )
        what = f"GPU {card.index} in use"
        found = f"{card.used_gib:.1f} of {card.total_gib:.1f} GiB by {who or 'a process not visible from here'}"
        if card.total_gib - card.used_gib >= needed:
            yield note(what, f"{found}; the rest is enough")
        else:
            fix = "stop it, or exclude the GPU with CUDA_VISIBLE_DEVICES"
            yield wrong(what, f"{found}; the run may need {needed:.1f}", fix)


def _interface_findings(machine: ThisMachine) -> Iterator[Finding]:
    def lets_through(interface: str) -> bool:
        # gloo: exact names. NCCL: prefixes; `=` means exact names, `^` all except the listed ones and loopback.
        of_nccl = variable == "NCCL_SOCKET_IFNAME"
        but = of_nccl and value.startswith("^")
        prefixes = value.removeprefix("^") if of_nccl else f"={value}"
        names = [name.strip() for name in prefixes.removeprefix("=").split(",")]
        matches = interface in names if prefixes.startswith("=") else interface.startswith(tuple(names))
        return not matches and interface != "lo" if but else matches

    present = machine.interfaces()
    for variable in INTERFACE_VARIABLES:
        if value := machine.variable(variable) or "":
            good = any(map(lets_through, present))
            found = value if good else f"{value} is not an interface of this machine ({', '.join(sorted(present))})"
            yield _ok_or_wrong(good, variable, found, f"export {variable} with one of its interfaces, or unset it")


def _ray_findings(
    config: RunConfig, ranks: int, seen: RayCluster | Unseen | None, machine: ThisMachine
) -> Iterator[Finding]:
    """Check the Ray cluster that the run joins or starts; it must have `ranks` devices."""
    cluster = config.cluster
    if isinstance(seen, RayCluster):
        good = len(seen.nodes) >= cluster.nodes
        found = f"{len(seen.nodes)} of {cluster.nodes} machines at {cluster.address}"
        found += "" if good else f": {', '.join(node.address for node in seen.nodes)}"
        yield _ok_or_wrong(good, RAY, found, f"run `ray start --address={cluster.address}` on the missing ones")
        yield _ray_devices(config, seen, ranks)
    elif isinstance(seen, Unseen):
        fix = "start it with `ray start --head` or `rlsys launch`, or set cluster.address=null"
        yield wrong(RAY, f"cluster.address={cluster.address}: {seen}", fix)
    elif cluster.nodes == 1:
        yield ok(RAY, "the run starts its own on this machine")
    elif machine.port_is_free(RAY_PORT):
        fix = "start on all of them with `rlsys launch`, or give cluster.address of a running cluster"
        yield unknown(RAY, f"cluster.address is null, but the run needs {cluster.nodes} machines", fix)
    else:
        found = f"port {RAY_PORT}, which a Ray head needs, is in use on this machine"
        yield wrong(RAY, found, "stop the program that uses it (`ray stop`), or set cluster.address to that cluster")


def _ray_devices(config: RunConfig, seen: RayCluster, ranks: int) -> Finding:
    kind, per_node = _RESOURCE[config.cluster.device], config.cluster.devices_per_node
    what = f"Ray's {kind}s"
    have = {node.address: int(node.resources.get(kind, 0)) for node in seen.nodes}
    total, free = sum(have.values()), int(seen.free.get(kind, 0))
    if total < ranks:
        each = ", ".join(f"{address} {number}" for address, number in have.items())
        fix = f"join more machines, start Ray with --num-{kind.lower()}s, or place the groups on fewer"
        return wrong(what, f"{total} of {ranks}: {each}", fix)
    if free < ranks:
        fix = "end the job that holds them (`ray list placement-groups` names it)"
        return wrong(what, f"{free} of {total} are free, {ranks} are needed", fix)
    # With exactly cluster.nodes machines, each must have all of cluster.devices_per_node.
    needed = 0 if per_node is None or len(seen.nodes) > config.cluster.nodes else per_node
    if short := next((address for address, number in have.items() if number < needed), ""):
        found = f"{short} has fewer than cluster.devices_per_node={per_node}"
        return wrong(what, found, "check CUDA_VISIBLE_DEVICES there, or lower cluster.devices_per_node")
    return ok(what, f"{free} free, {ranks} needed")


def _room_findings(config: RunConfig, plan: Mapping[str, Any] | None, machine: ThisMachine) -> Iterator[Finding]:
    """Check disk space, shared memory and host memory. Checks that depend on the plan are skipped without one."""
    if plan is not None:
        yield _output(config, float(plan["checkpoint_gib"]), machine)
    yield _spill(machine)
    device = config.cluster.device
    needs = {"shared": SHARED_BYTES[device] / GIB} if plan is None else plan["host_gib"]
    yield _shared(device, needs["shared"], machine)
    # Without GPUs, the groups of a Ray cluster may be on other machines.
    if needs.keys() > {"shared"} and (device is Device.gpu or config.cluster.address is None):
        yield _host_memory(needs, machine)


def _host_memory(needs: Mapping[str, float], machine: ThisMachine) -> Finding:
    """Check the available host memory against `needs`, the plan's GiB by part."""
    told = {
        "groups": "models and optimisers",
        "pinned": "groups that are off their devices (pinned)",
        "staged": "weights that engines stage (pinned on GPUs)",
        "pushed": "the weights that were pushed last (pinned on GPUs)",
        "buckets": "weight buckets",
        "saved": "a checkpoint that is being written",
    }
    free, needed = machine.memory_gib(), sum(needs.get(part, 0.0) for part in told)
    parts = ", ".join(f"{needs[part]:.1f} for {what}" for part, what in told.items() if part in needs)
    found = f"{free:.1f} GiB free, and the run needs about {needed:.1f}: {parts}"
    fix = "free some, use a machine with more, or place the groups on fewer ranks"
    if "pinned" in needs:
        fix += " or apart (cluster.mode=disaggregated)"
    return _ok_or_wrong(free > needed, "memory", found, fix)


def _output(config: RunConfig, checkpoint_gib: float, machine: ThisMachine) -> Finding:
    what, folder = "disk for the run", Path(config.output_dir)
    try:
        disk = machine.disk(folder)
    except Unseen as problem:
        return wrong(what, f"output_dir={folder}: {problem}", "set it to a writable folder")
    if not disk.writable:
        found = f"{disk.folder} is not writable by this user"
        return wrong(what, found, "set another output_dir, or make it writable")
    count, others = _checkpoints_at_once(config)
    by_disk = config.cluster.sync_mode is SyncMode.disk
    weights = _BUCKET_FILES * config.cluster.sync_bucket_bytes / GIB if by_disk else 0.0
    needed = count * checkpoint_gib + weights + _LOGS_GIB
    checkpoints = f"{count} checkpoint{'s' if count > 1 else ''} of {spoken(checkpoint_gib)}"
    found = (
        f"{disk.free_gib:.1f} GiB free in {disk.folder}, and the run may write {needed:.1f}, including {checkpoints}"
    )
    fits = int((disk.free_gib - weights - _LOGS_GIB) / checkpoint_gib) - others
    fewer = f"set checkpoint.keep_last={fits}, or " if 0 < fits < count - others else ""
    fix = f"{fewer}free {needed - disk.free_gib:.1f} GiB, or set another output_dir"
    return _ok_or_wrong(disk.free_gib >= needed, what, found, fix)


def _checkpoints_at_once(config: RunConfig) -> tuple[int, int]:
    """Return the maximum number of checkpoints on disk, and how many of them `keep_last` does not count: the one being
    written, the best one and landmarks."""
    settings, steps = config.checkpoint, config.trainer.steps
    saved = {*range(settings.interval, steps + 1, settings.interval), steps} if settings.interval > 0 else {steps}
    landmarks = 0 if settings.keep_every is None else sum(step % settings.keep_every == 0 for step in saved)
    others = 1 + settings.keep_best + landmarks
    return len(saved) if settings.keep_last is None else min(len(saved), settings.keep_last + others), others


def _spill(machine: ThisMachine) -> Finding:
    what = "disk for Ray"
    try:
        scratch = ray_parent()
        disk = machine.disk(scratch)
    except UserError as problem:
        return wrong(what, str(problem))
    except Unseen as problem:
        return wrong(what, f"{scratch}: {problem}", "set TMPDIR to a writable folder")
    if not disk.writable:
        return wrong(what, f"{disk.folder} is not writable by this user", "set TMPDIR to another folder")
    used = 1 - disk.free_gib / disk.total_gib if disk.total_gib else 1.0
    found = f"{disk.free_gib:.1f} GiB free in {disk.folder}, {used:.0%} full"
    if used >= _FULL or disk.free_gib < _LOGS_GIB:
        return wrong(
            what, f"{found}; Ray spills no objects to a disk that is {_FULL:.0%} full", "free some, or set TMPDIR"
        )
    return ok(what, found)


def _shared(device: Device, needed: float, machine: ThisMachine) -> Finding:
    """Check that /dev/shm has `needed` GiB free.

    A process that writes more than there is dies of SIGBUS; Ray's objects go to the slower disk instead.
    """
    what = str(SHARED_MEMORY)
    try:
        disk = machine.disk(SHARED_MEMORY)
    except Unseen as problem:
        return unknown(what, str(problem))
    if disk.folder != SHARED_MEMORY:
        return unknown(what, "this system has no shared memory")
    libraries = SHARED_BYTES[device] / GIB
    library = f"{libraries:g} for {'NCCL' if device is Device.gpu else 'Ray'}"
    found = f"{disk.free_gib:.1f} GiB free, and the run needs {needed:.1f}: {library}"
    if loading := needed - libraries:
        found += f", {loading:.1f} for weights that engines load"
    if disk.free_gib >= needed:
        return ok(what, found)
    fix = f"free some, or give the container more: docker run --ipc=host, or --shm-size={ceil(needed) + 1}g"
    if loading:
        fix += "; or lower cluster.sync_bucket_bytes"
    if device is Device.cpu and disk.free_gib >= loading:
        return note(what, f"{found}; Ray's objects use the slower disk", fix)
    return wrong(what, found, fix)


def spoken(gib: float) -> str:
    """Format a size for messages, in GiB or MiB."""
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def model_findings(folder: Path, family: str | None = None, key: str = MODEL) -> Iterator[Finding]:
    """Check the weights and the tokenizer of a model folder, the value of `key`, whose config.json is valid."""
    problems = list(_weight_problems(folder, family))
    yield from (wrong(key, sentence, _AGAIN) for sentence in problems)
    if not problems:
        size = sum(file.stat().st_size for file in HfReader(folder).files()) / GIB
        tensors = len(WeightMap(read_architecture(folder, family)).hf_names())
        yield ok(key, f"{folder}: all {tensors} tensors, {spoken(size)}")
    if key == MODEL:  # A teacher has the same tokens.
        yield _tokenizer(folder)


def data_findings(key: str, path: Path) -> tuple[Finding, Question | None]:
    """Check the first row of a question file. Returns the finding, and the question in that row or None if the row
    cannot be read."""
    try:
        question = read_questions(path, limit=1)[0]
    except UserError as problem:
        return wrong(key, str(problem)), None
    except OSError as problem:
        return wrong(key, f"{path} cannot be read ({problem.strerror})", "make it readable for this user"), None
    size = path.stat().st_size / GIB
    return ok(key, f"{path}: {spoken(size)}, the first row is a question with an answer"), question


def _weight_problems(folder: Path, family: str | None) -> Iterator[str]:
    """Yield missing and damaged weight files; if all are intact, missing tensors and wrong shapes."""
    try:
        # Files listed in the index, or all if there is no index.
        files = sorted(folder.glob("*.safetensors"))
        if (index := folder / INDEX).is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted(folder / str(name) for name in set(names))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        yield f"{folder / INDEX} is damaged"
        return
    missing = [file.name for file in files if not file.is_file()]
    if not files:
        yield f"{folder} holds no weights (*.safetensors)"
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        yield f"{folder} lacks {len(missing)} of {len(files)} files in its index: {named}"
    damaged = [reason for file in files if file.is_file() and (reason := _damage(file))]
    yield from damaged
    if not files or missing or damaged:
        return
    try:
        reader, weights = HfReader(folder), WeightMap(read_architecture(folder, family))
        weights.check_hf_names(reader.names())
    except UserError as problem:
        yield str(problem)
        return
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if (found := reader.spec(name).shape) != shape:
                yield f"{name} has shape {list(found)}, but config.json implies {list(shape)}: they belong to different models"
                return


def _damage(file: Path) -> str:
    """Return the reason why a weight file cannot be read; empty if it can."""
    try:
        with safe_open(file, framework="np"):
            return ""
    except SafetensorError as problem:
        return f"{file.name} is truncated or damaged ({problem})"
    except OSError as problem:
        return f"{file.name} cannot be read ({problem.strerror or problem})"


def _tokenizer(folder: Path) -> Finding:
    """Check that the tokenizer is fast (tokenizer.json) and has an end-of-sequence token."""
    from tokenizers import Tokenizer

    what, file = "tokenizer", folder / "tokenizer.json"
    if not file.is_file():
        return wrong(what, f"{file} is missing", _AGAIN)
    try:
        words = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as problem:  # noqa: BLE001 - the library raises nothing narrower
        return wrong(what, f"{file} cannot be read ({problem})", _AGAIN)
    settings, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    naming = [settings, older] if older.is_file() else [settings]
    try:
        ends = [json.loads(each.read_text(encoding="utf-8")).get("eos_token") for each in naming]
    except (OSError, ValueError, AttributeError, RecursionError):
        return wrong(what, f"{settings} is missing or damaged", _AGAIN)
    found = f"{words} tokens" if any(ends) else f"{settings} has no eos_token"
    return _ok_or_wrong(any(ends), what, found, "set it to the token that ends an answer")


def search_findings(config: RunConfig, question: str, machines: int, machine: ThisMachine) -> Iterator[Finding]:
    """Check the running search servers, or the index and port of a server that the run or its launcher starts.

    `question` is a question of the run, or empty if none could be read; `machines` is the number of machines of the
    run.
    """
    search = config.search
    if not search.enabled:
        yield ok(SERVER, "not needed: search.enabled=false")
    elif not needs_server(search):
        yield ok(SERVER, f"not needed: searches are replayed from {search.cassette.path}")
    elif search.url is None:
        if search.index is not None:
            yield _index_there(config, Path(search.index))
        yield _later(config, machine)
    else:
        answers = machine.search(search, question or _QUESTION)
        yield from (_answered(search, answer) for answer in answers)
        compared = len(answers) > 1 and not any(answer.error for answer in answers)
        if compared and (differs := machine.search_differs(search)):
            yield wrong(SERVER, differs)
        # Rollout workers on other machines query the servers too.
        own = [answer.url for answer in answers if urlsplit(answer.url).hostname in _LOOPBACK]
        if machines > 1 and own:
            found = f"{own[0]} is a loopback address, which rollout workers on other machines cannot reach"
            yield wrong(
                SERVER, found, "use the address at which others reach the server, and serve with --host 0.0.0.0"
            )
        elif machines > 1:
            yield note(SERVER, "checked from this machine; the others must reach it too")


def _answered(search: SearchConfig, answer: SearchAnswer) -> Finding:
    if answer.error:
        parts = urlsplit(answer.url)
        place, host = ("", "") if parts.hostname in _LOOPBACK else (f" on {parts.hostname}", " --host 0.0.0.0")
        start = f"rlsys search serve {search.index or 'INDEX'} --topk {search.topk} --port {parts.port or DEFAULT_PORT}"
        return wrong(SERVER, f"{answer.url}: {answer.error}", f"start it{place}: {start}{host}")
    if answer.passages < search.topk:
        found = f"{answer.url} returns {answer.passages} of search.topk={search.topk} passages for a question"
        return wrong(SERVER, found, f"check its index, or set search.topk={max(answer.passages, 1)}")
    return ok(SERVER, f"{answer.url} answers with {answer.passages} passages")


def _index_there(config: RunConfig, folder: Path) -> Finding:
    """Check the search index; unknown if only other machines serve it and it is missing here."""
    serving = config.cluster.search.nodes
    if config.cluster.nodes > 1 and serving and not folder.exists():
        where = ", ".join(serving)
        return unknown(SEARCH_INDEX, f"{folder} is not on this machine; machine {where}, which serves it, must have it")
    try:
        manifest = read_manifest(folder)
    except UserError as problem:
        return wrong(SEARCH_INDEX, str(problem))
    except OSError as problem:
        return wrong(SEARCH_INDEX, f"{folder} cannot be read ({problem.strerror})", "make it readable for this user")
    files = [file for file in folder.iterdir() if file.is_file()]
    empty = [file.name for file in files if not file.stat().st_size]
    if empty:
        return wrong(SEARCH_INDEX, f"{folder / empty[0]} is empty", "build the index again with `rlsys search index`")
    size = sum(file.stat().st_size for file in files) / GIB
    rows = manifest.get("rows")
    passages = f", {rows:,} passages" if isinstance(rows, int) else ""
    return ok(SEARCH_INDEX, f"{folder}: {manifest['kind']}{passages}, {spoken(size)}")


def _later(config: RunConfig, machine: ThisMachine) -> Finding:
    settings = config.cluster.search
    if not settings.nodes:
        return ok(SERVER, f"the run starts one on {config.search.index}")
    where = f"the launcher starts one on machine {', '.join(settings.nodes)}, at port {settings.port}"
    if config.cluster.nodes > 1:
        return unknown(SERVER, f"{where}, which cannot be checked from here")
    free = machine.port_is_free(settings.port)
    found = where if free else f"{where}, which another program uses here"
    return _ok_or_wrong(free, SERVER, found, "stop that program, or set another cluster.search.port")
