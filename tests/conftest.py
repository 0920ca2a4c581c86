"""Before any test imports transformers, SGLang's stand-ins must be importable; see `rlsys.rollout`."""

import rlsys.rollout  # noqa: F401
