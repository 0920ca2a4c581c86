"""The driver: the staleness scheduler, the pipeline of prompt groups, the worker groups, weight sync, rewards, resume.

`pipeline/` is pure and knows no Ray; `rewards/` has what an episode earns, `evaluation/` what held-out answers are worth;
the other modules are the worker groups as the driver calls them, and what a run keeps.

Process: the driver. May import: every room above it, from cluster up to config.
"""
