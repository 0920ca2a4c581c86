"""Report, live page and token audit of a run folder.

Process: a separate process, during a run or after it. May import: search (its HTTP server), rollout (its tokenizer),
observe, data, algorithms, config, errors, files.
"""
