"""The project's folder, for tests that read its files or start its commands."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
