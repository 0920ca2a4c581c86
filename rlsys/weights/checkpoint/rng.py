"""The random generators of one process, in a file of its own beside a checkpoint's shards.

Torch's (CPU and CUDA), those that Megatron keeps for parallel regions, numpy's and Python's: all that a draw in a
worker process can come from. They continue only in the parallel layout that they were saved in: in another one
there is no process that has drawn what a process is going to.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from numpy.typing import NDArray

from rlsys.errors import UserError

_CPU, _CUDA, _NUMPY, _REST = "torch", "cuda", "numpy", "rest"
_TRACKED = "megatron/"


def parallel_layout() -> dict[str, int]:
    """How the model is spread over this group's processes."""
    return {
        "world": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def file_name(rank: int) -> str:
    """Of the file of one process."""
    return f"rng_{rank:05}.npz"


def capture() -> bytes:
    """The content of this process's file: all generators as they are now."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    keys = numpy_state["state"].pop("key")
    version, words, gauss = random.getstate()
    rest = {"numpy": numpy_state, "python": [version, words, gauss]}
    arrays: dict[str, NDArray[Any]] = {
        _CPU: torch.get_rng_state().numpy(),
        _NUMPY: keys,
        _REST: np.frombuffer(json.dumps(rest).encode(), np.uint8),
    }
    arrays |= {_TRACKED + name: state.numpy() for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        arrays[_CUDA] = torch.cuda.get_rng_state().numpy()
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def restore(folder: Path, layout: Mapping[str, int] | None) -> bool:
    """Let all generators of this process go on as in the checkpoint `folder`, which was saved in `layout`.

    False, and nothing is changed, if that is another one than this group's, or None (a converted model). Raises UserError, and changes nothing, if this process's file is missing or damaged.
    """
    if layout != parallel_layout():
        return False
    path = folder / file_name(dist.get_rank())
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        rest = json.loads(arrays.pop(_REST).tobytes())
        numpy_state = rest["numpy"]
        numpy_state["state"]["key"] = arrays.pop(_NUMPY)
        version, words, gauss = rest["python"]
        python_state = version, tuple(words), gauss
        states = {name: torch.from_numpy(array) for name, array in arrays.items()}
        on_cpu, on_gpu = states.pop(_CPU), states.pop(_CUDA, None)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing: the checkpoint lacks the random generators of a process; take an earlier one."
        ) from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged: take an earlier checkpoint. ({error})") from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(on_cpu)
    get_cuda_rng_tracker().set_states({name.removeprefix(_TRACKED): state for name, state in states.items()})
    if on_gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(on_gpu)
    return True
