"""Takes reached shares from a result file of `python -m bench.gpu`, which measured one GPU. Pure, apart from the file.

The file's optimiser steps and rounds of generation are compared with the formulas of `planning.work` for the same work:

    compute, layer_s             least squares over the steps with kept activations, of each size of micro-batch
    decode_layer_s, request_s    least squares over the rounds with each number of requests
    sync_link                    transfer through host memory / the link to the host

All other shares stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.apps.planner.calibrate import nonnegative
from rlsys.cluster.planning.hardware import SPEEDS, Reached
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import UserError
from rlsys.files import parse_json
from rlsys.trainer.batches import SampleSize
from rlsys.weights.weight_map import read_architecture

KEY = "--bench"
Figures = Mapping[str, float]
"""Name of a figure -> its value."""


@dataclass(frozen=True, slots=True)
class GpuBench:
    """Figures of one GPU."""

    path: Path
    device: str
    """Its name in `SPEEDS`."""
    work: Mapping[str, Any]
    """Sizes of the measured work."""
    parts: Mapping[str, Figures]

    def reached(self, before: Reached, source: str) -> tuple[Reached, str]:
        """Return `before` with the measured shares in their places, and `source` with theirs. Raises UserError."""
        costs = self._costs(before)
        found = self._training(costs)
        # The engine's products are measured with the share that training has reached.
        found |= self._decoding(self._costs(replace(before, **found)))
        if host := self.parts.get("sync", {}).get("tensor"):
            found["sync_link"] = min(1.0, host * 1e9 / costs.speed.host)
        if not found:
            sentence = f"{self.path} has none of the figures that a plan takes: run the parts te, engine and sync."
            raise UserError(sentence, code="missing", key=KEY)
        return replace(before, **found), f"{', '.join(found)} measured on {self.device} in {self.path}; others {source}"

    def _costs(self, reached: Reached) -> HardwareCosts:
        """Return the formulas for one GPU and the measured model."""
        config = RunConfig()
        config.cluster.device, config.cluster.devices_per_node = Device.gpu, 1
        config.cluster.placement = {"actor": "0", "inference": "1", "rollout": "2"}
        folder = PROJECT_CONFIGS / "model" / "shapes" / str(self.work["shape"])
        if not folder.is_dir():
            sentence = f"{self.path} measured the model {self.work['shape']}, whose shape is not in {folder.parent}."
            raise UserError(sentence, code="unknown", key=KEY)
        config.model.path = str(folder)
        return HardwareCosts(config, read_architecture(str(folder)), self.device, reached)

    def _training(self, costs: HardwareCosts) -> dict[str, float]:
        work, call = self.work, costs.calls()["actor"]
        figures = next((self.parts[name] for name in ("te", "local") if self.parts.get(name)), {})
        size = SampleSize(work["length"], round(work["trained"] * work["length"]))
        updated = call.apply_s - costs.reached.call_s
        products, rest = [], []
        for sequences in work["sequences"]:
            seconds = figures.get(f"{sequences * size.tokens} tokens, kept: step")
            if seconds is not None:
                products.append(call.passes * sequences * call.flops.of(*size) / costs.speed.flops)
                moved = sequences * size.tokens * call.token_s
                rest.append((seconds - updated) / work["micro_batches"] - moved)
        if len(products) < 2:  # One size cannot tell products from launches.
            return {}
        slower, launched = nonnegative([np.array(products), np.ones(len(products))], np.array(rest))
        if slower < 1:
            sentence = f"{self.path} has optimiser steps that are faster than the peak of {self.device}."
            raise UserError(sentence, code="conflict", key=KEY)
        return {"compute": 1 / slower, "layer_s": launched / call.passes / costs.model.layers}

    def _decoding(self, costs: HardwareCosts) -> dict[str, float]:
        work, figures = self.work, self.parts.get("engine", {})
        engine = replace(costs.engine(), step_s=0.0, request_s=0.0)
        steps, requests, rest = [], [], []
        for count in work["requests"]:
            rate = figures.get(f"{count} requests")
            if rate:
                new, prompt = work["new_tokens"], work["prompt_tokens"]
                known = new * engine.decode_s(count, count * (prompt + new / 2))[0]
                known += count * engine.fill_s(prompt, 0) + engine.weights_s
                steps.append(float(new * costs.model.layers))
                requests.append(float(new * count))
                rest.append(count * new / rate - known)
        if len(steps) < 2:
            return {}
        layer_s, request_s = nonnegative([np.array(steps), np.array(requests)], np.array(rest))
        return {"decode_layer_s": layer_s, "request_s": request_s}


def read_bench(path: Path, device: str) -> GpuBench:
    """Return the figures of a result file, which must be of the kind of GPU `device`. Raises UserError."""
    try:
        content = parse_json(path.read_bytes())
        words = re.findall(r"\w+", str(content["device"]).upper())
        work = content["work"]
        parts = {
            name: {one["name"]: one["value"] for one in part["figures"] if isinstance(one["value"], int | float)}
            for name, part in content["parts"].items()
        }
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", code="not_found", key=KEY) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        sentence = f"{path} is not a result file of python -m bench.gpu: give outputs/bench/gpu.json."
        raise UserError(sentence, code="malformed", key=KEY) from error
    measured = next((name for name in sorted(SPEEDS, key=len, reverse=True) if name in words), None)
    if measured != device:
        sentence = f"{path} was measured on {content['device']}, but the plan is for {device}: give --on that device."
        raise UserError(sentence, code="mismatch", key=KEY)
    return GpuBench(path, device, work, parts)
