"""Rollouts by SGLang. Import this package before transformers: see `sglang_cpu.offer_standins`."""

from rlsys.rollout.sglang_cpu import offer_standins

offer_standins()
