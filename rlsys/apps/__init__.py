"""User entry points: command line, Python API, chat, evaluation, data preparation. Thin layers over the other packages.

Process: the process of the command. May import: everything.
"""
