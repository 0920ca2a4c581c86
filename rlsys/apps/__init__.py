"""What users call: command line, Python API, chat, evaluation, data preparation. Thin, each over the rooms below.

Process: the command's own. May import: everything.
"""
