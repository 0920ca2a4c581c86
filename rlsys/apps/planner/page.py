"""Writes a prediction where the report finds it: into a run's folder, or into a folder of its own for a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rlsys.apps.planner.simulation import Simulated
from rlsys.config.compose import as_dict
from rlsys.config.schema import RunConfig
from rlsys.files import json_safe, write_atomically
from rlsys.observe.records import TIMELINE, LineLog, timeline_row
from rlsys.observe.run_folder import CONFIG, PLAN, open_run, require_run
from rlsys.report.report_page import write_report


def save_prediction(answer: Mapping[str, Any], run: Path) -> None:
    """Write `answer` into the folder of a run. Raises UserError if it is none."""
    require_run(run)
    write_atomically(run / PLAN, json.dumps(json_safe(dict(answer)), indent=2) + "\n")


def write_page(config: RunConfig, found: Simulated, answer: Mapping[str, Any], file: Path) -> None:
    """Write the report's page of the simulated steps, which are recorded as those of a run, to `file`."""
    with TemporaryDirectory() as above:
        run = Path(above) / config.name
        run.mkdir()
        (run / CONFIG).write_text(yaml.safe_dump(json_safe(as_dict(config))))
        save_prediction(answer, run)
        log = LineLog(run / TIMELINE)
        begin, spans = round(found.begin_s * 1e9), sorted(found.spans, key=lambda span: span.end_ns)
        for number, step in enumerate(found.steps, 1):
            end, done = round(step.end_s * 1e9), 0
            while done < len(spans) and (spans[done].end_ns <= end or number == len(found.steps)):
                done += 1
            own = [replace(span, args={**span.args, "step": number}) for span in spans[:done]]
            log.append(timeline_row(number, (begin, end), own))
            begin, spans = end, spans[done:]
        log.close()
        write_report([open_run(run)], file)
