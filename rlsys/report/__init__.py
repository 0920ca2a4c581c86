"""Readers of a run's folder: the report, the live page and the audit of tokens.

Process: one of its own, beside a run or after it. May import: search (its HTTP server), rollout (its tokenizer),
observe, data, algorithms, config, errors, files.
"""
