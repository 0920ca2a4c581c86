"""Imports that all Megatron processes of the tests share; see `tests.trainer.harness.run_group`."""

import tests.trainer.harness
import tests.trainer.reference  # noqa: F401
