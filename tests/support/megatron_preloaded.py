"""Imports shared by all Megatron processes of the tests; see `tests.support.megatron_processes`."""
# ruff: noqa: F401

import gc

import hypothesis
import pytest

import rlsys.orchestrator.weight_sync
import rlsys.orchestrator.worker_groups
import rlsys.weights.convert.conversion
import tests.trainer.harness
import tests.trainer.reference

# Megatron collects garbage at every save and load; the collection then skips all that the processes share.
gc.freeze()
