"""Data passed between the stages: questions, prompts, trajectories and prompt groups.

Process: every one. May import: algorithms, config, errors, files.
"""
