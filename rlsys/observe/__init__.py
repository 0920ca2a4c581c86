"""The record that a run keeps: metrics, spans, status, trackers, kept trajectories; and the facts of its machine.

Process: the driver, for the most part. May import: data, config, errors, files.
"""
