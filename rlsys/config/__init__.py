"""Typed configuration of a run: schema, composition by Hydra, and checks that need the configuration alone.

Process: all; the driver reads it once. May import: errors, files.
"""
