"""An advantage estimator: the score minus the median of the prompt group, which one lucky episode does not move.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu algorithm.advantage=examples.extend.advantage.above_median
"""

from collections.abc import Sequence
from statistics import median

import numpy as np

from rlsys.algorithms.advantages import Floats, RewardedEpisode


def above_median(episodes: Sequence[RewardedEpisode], *, scale: float = 1.0) -> list[Floats]:
    """Return the advantages [seq] of each episode of a prompt group; values at untrained tokens are ignored."""
    middle = median(episode.score for episode in episodes)
    return [np.full(len(episode.trained), scale * (episode.score - middle)) for episode in episodes]
