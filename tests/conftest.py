"""What must come before any other import of a test."""

import os

# On a few cores, threads of torch and of an engine's processes only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

# How long an example takes tells how busy the machine is, and nothing of the code.
settings.register_profile("rlsys", deadline=None)
settings.load_profile("rlsys")
