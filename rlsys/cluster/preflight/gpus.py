"""The cards of this machine: number, memory, driver, who is on them; and NCCL. Pure.

Memory is compared with the plan's estimate of the fullest device, as `rlsys.cluster.planning.hardware` sums it up, for the cards
and the layers that are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlsys.cluster.planning.hardware import USABLE, fullest_device
from rlsys.cluster.preflight.estimates import plan_of
from rlsys.cluster.preflight.finding import Finding, note, ok, unknown, wrong
from rlsys.cluster.preflight.probes import Gpus, Probes, Unseen
from rlsys.config.schema import Layers, RunConfig
from rlsys.observe.capabilities import Capabilities
from rlsys.weights.sockets import INTERFACE_VARIABLES

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> of the driver that programs built for it need at least.

https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""
_RESERVED_GIB = 1.0
"""Of a card that a driver may hold for itself and a desktop."""


def gpu_findings(config: RunConfig, wanted: int, probes: Probes) -> Iterator[Finding]:
    """Of this machine, which is to give `wanted` cards."""
    try:
        seen = probes.gpus()
    except Unseen as problem:
        yield wrong("GPUs", str(problem), "run on a machine with NVIDIA GPUs and their driver")
        return
    yield _number(seen, wanted)
    # Only now: torch takes memory of the cards that it looks at.
    here = probes.capabilities()
    yield _driver(seen.driver, here.cuda)
    if not seen.cards:
        return
    smallest = min(card.total_gib for card in seen.cards)
    real = _on_these(config, smallest, here)
    plan = plan_of(real)
    if plan is None:
        return
    names, needed = fullest_device(real, plan)
    yield _memory(names, needed, smallest, config.cluster.device_memory_gib)
    yield from _tenants(seen, needed)


def _on_these(config: RunConfig, card_gib: float, here: Capabilities) -> RunConfig:
    """`config` with the memory of these cards for the stated one, and what `model.layers=auto` is here."""
    layers = here.layers if config.model.layers is Layers.auto else config.model.layers
    return replace(
        config,
        model=replace(config.model, layers=layers),
        cluster=replace(config.cluster, device_memory_gib=card_gib),
    )


def interface_findings(probes: Probes) -> Iterator[Finding]:
    """What the environment says of network interfaces, where it says something."""
    present = probes.interfaces()
    for variable in INTERFACE_VARIABLES:
        value = probes.variable(variable)
        if not value:
            continue
        if any(_names(value, interface, variable) for interface in present):
            yield ok(variable, value)
        else:
            yield wrong(
                variable,
                f"{value} is none of this machine's interfaces: {', '.join(sorted(present))}",
                f"export {variable} with one of them, or unset it",
            )


def nccl_findings(here: Capabilities) -> Iterator[Finding]:
    """How far its presence goes; `rlsys.observe.capabilities` says where it is absent."""
    if here.nccl:
        yield note("NCCL", f"in torch {here.torch}; whether cards and machines reach each other shows at the start")


def _number(seen: Gpus, wanted: int) -> Finding:
    names = ", ".join(sorted({card.name for card in seen.cards}))
    found = f"{len(seen.cards)} of {wanted}" + (f": {names}" if names else "")
    if len(seen.cards) >= wanted:
        return ok("GPUs", found)
    return wrong(
        "GPUs",
        found,
        "place the groups on fewer (cluster.placement), look at CUDA_VISIBLE_DEVICES, or use a machine with more",
    )


def _driver(driver: str, cuda: str | None) -> Finding:
    what = "CUDA driver"
    if cuda is None:
        return wrong(what, f"{driver}, and torch is built without CUDA", "install torch as requirements/gpu.txt says")
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is None:
        return unknown(what, f"{driver}; what CUDA {cuda} needs is not known here", "look at NVIDIA's release notes")
    if int(driver.split(".")[0]) < oldest:
        return wrong(
            what,
            f"{driver} is too old for torch's CUDA {cuda}, which needs {oldest}",
            f"install driver {oldest} or newer, or torch built for an older CUDA",
        )
    return ok(what, f"{driver}, torch is built for CUDA {cuda}")


def _memory(names: Sequence[str], needed: float, card_gib: float, stated_gib: float | None) -> Finding:
    """Of the smallest card, which the groups `names` are to share; `stated_gib` is what the config takes it for."""
    found = f"{' + '.join(names)} take about {needed:.1f} of {card_gib:.1f} GiB of a card"
    if stated_gib is not None and abs(stated_gib - card_gib) > (1 - USABLE) * stated_gib:
        found += f" (not of cluster.device_memory_gib={stated_gib:g})"
    if needed <= card_gib * USABLE:
        return ok("GPU memory", found)
    megatron = [name for name in names if name != "rollout"]
    fixes = [f"raise {name}.parallel.tp or lower {name}.micro_batch_tokens" for name in megatron]
    fixes += ["lower rollout.engine.memory_fraction or raise rollout.engine.tp"] if "rollout" in names else []
    return wrong("GPU memory", f"{found}, of which {USABLE:.0%} can be used", "; or ".join(fixes))


def _tenants(seen: Gpus, needed: float) -> Iterator[Finding]:
    """Who is on the cards already, and whether it leaves what the fullest card is to hold."""
    taken = [card for card in seen.cards if card.used_gib > _RESERVED_GIB]
    if not taken:
        yield ok("GPUs in use", "nobody else is on them")
        return
    for card in taken:
        who = _named(seen, card.uuid) or "a process that is not seen from here"
        found = f"{card.used_gib:.1f} of {card.total_gib:.1f} GiB by {who}"
        if card.total_gib - card.used_gib >= needed:
            yield note(f"GPU {card.index} in use", f"{found}; the rest is enough")
        else:
            fix = "end it, or leave the card out with CUDA_VISIBLE_DEVICES"
            yield wrong(f"GPU {card.index} in use", f"{found}; {needed:.1f} may be wanted", fix)


def _named(seen: Gpus, uuid: str) -> str:
    here = [tenant for tenant in seen.tenants if tenant.uuid == uuid]
    return ", ".join(f"{tenant.name} (process {tenant.pid}, {tenant.used_gib:.1f} GiB)" for tenant in here)


def _names(value: str, interface: str, variable: str) -> bool:
    """Whether `value` lets `interface` through.

    gloo takes whole names. NCCL takes prefixes; behind `=` whole names, behind `^` all but these and the loopback.
    """
    if variable != "NCCL_SOCKET_IFNAME":
        return interface in _listed(value)
    but, prefixes = value.startswith("^"), value.removeprefix("^")
    names = _listed(prefixes.removeprefix("="))
    matches = interface in names if prefixes.startswith("=") else interface.startswith(tuple(names))
    return not matches and interface != "lo" if but else matches


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]
