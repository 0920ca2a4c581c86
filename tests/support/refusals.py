"""Expects a UserError by its code and key, independent of its wording."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

import pytest

from rlsys.errors import Code, UserError


@contextmanager
def refused(code: Code, key: str | PathLike[str] | None = None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Assert that the block raises a UserError with `code`, and with `key` if given.

    with refused("out_of_range", "trainer.steps"):
        load_config("searchr1_tiny_cpu", ["trainer.steps=0"])
    """
    with pytest.raises(UserError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert key is None or caught.value.key == str(key), caught.value
