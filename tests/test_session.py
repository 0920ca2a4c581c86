"""What a session refuses before it starts anything dear."""

from __future__ import annotations

import pytest

from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.errors import RunError
from rlsys.session import require_search


async def test_a_search_server_that_is_not_there_is_named() -> None:
    config = RunConfig(search=SearchConfig(url="http://127.0.0.1:9", timeout_s=2, retries=0))
    with pytest.raises(RunError, match=r"search\.url=http://127\.0\.0\.1:9 does not answer"):
        await require_search(config)
