"""Readers of a run's folder: the report, the live page (`watch/`) and the audit of tokens (`audit/`).

Process: one of its own, beside a run or after it. May import: search (its HTTP server), rollout (its tokenizer), observe, data,
algorithms, config, errors, files.
"""
