"""Data that flows between the stages: questions, trajectories, prompt groups; and the prompts they begin with.

Process: every one. May import: algorithms, config, errors, files.
"""
