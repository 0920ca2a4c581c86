"""Driver of a run: staleness scheduler, prompt group pipeline, worker groups, weight sync, rewards, resume.

`pipeline/` schedules prompt groups without importing Ray, `rewards/` rewards episodes and `evaluation/` scores held-out
answers. The other modules call the worker groups and write the run's files.

Process: the driver. May import: all packages of rlsys but `report`, `apps` and `train`.
"""
