"""Records of a run: metrics, spans, status, trackers, kept trajectories, and the machine's environment.

Process: the driver, for the most part. May import: data, config, errors, files.
"""
