"""Declares the dependencies and extras, read from the requirement files."""

from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Requirements of a file, without options, includes and comments."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and line[0] not in "#-"]


setup(
    install_requires=requirements("base"),
    extras_require={name: requirements(name) for name in ("cpu", "gpu", "dev", "mcp")},
    package_data={
        "rlsys": ["py.typed"],
        "rlsys.cluster.planning": ["hardware.yaml", "reached.yaml"],
        "rlsys.config": ["rlinf.yaml"],
        "rlsys.apps.chat": ["defaults.yaml", "static/*"],
        "rlsys.apps.evaluation": ["static/*"],
        "rlsys.report": ["static/*"],
        "rlsys.rollout": ["sglang_logging.json"],
        "rlsys.weights": ["family/*.yaml"],
    },
)
