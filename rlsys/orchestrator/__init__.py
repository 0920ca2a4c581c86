"""The driver: the staleness scheduler, the pipeline of prompt groups, the worker groups, weight sync, rewards, resume.

`pipeline/` is pure and knows no Ray; `groups/` has the worker groups as the driver calls them, `rewards/` what an episode
earns, `evaluation/` what held-out answers are worth.

Process: the driver. May import: every room above it, from cluster up to config.
"""
