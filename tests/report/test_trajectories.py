"""How old the page says that tokens are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlsys.report.run_model import TrajectoryIndex, row_of
from tests.report.made import Maker


def test_age_is_of_the_policy_that_is_trained_not_of_the_one_that_scored() -> None:
    """Step 5 trains version 4; its tokens are of versions 2 and 3, and version 3 has scored them."""
    made = Maker().kept(5, 0, 0)
    trained = np.flatnonzero(made.loss_mask)
    versions = made.versions.copy()
    versions[trained] = 3
    versions[trained[0]] = 2
    kept = replace(made, versions=versions, policy_version=3)
    index = TrajectoryIndex()
    index.add(kept)
    found = index.as_json(0)
    assert found is not None
    assert found["columns"]["lag"] == [4 - 2]
    assert row_of(kept)["trained_version"] == 4
