"""The function of `tests.support.search_results`, for other rooms until they import it from there."""

from tests.support.search_results import result_of as result_of
