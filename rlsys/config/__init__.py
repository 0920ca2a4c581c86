"""Typed configuration of a run: schema, composition by Hydra, and checks that need only the configuration.

Process: all; the driver reads it once. May import: errors, files.
"""
