"""Data passed between the stages: questions, prompts, trajectories and prompt groups.

Process: all. May import: algorithms, config, errors, files.
"""
