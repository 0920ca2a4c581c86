"""User entry points: command line, Python API, chat, evaluation, data preparation. Thin layers over the other packages.

Process: the command's own. May import: everything.
"""
