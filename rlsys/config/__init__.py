"""The typed settings of a run: schema, composition by Hydra, checks that need nothing but the settings.

Process: every one; it is read once, by the driver. May import: errors, files.
"""
