"""Path of the project, for tests that read its files or run its commands."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
