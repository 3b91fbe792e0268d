"""Properties of autocast on random programs; `python -m benchmarks.fuzz` runs many more of them."""

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings

from testing.random_programs import Rejected, cases, check

# One shrunk failure is reported at a time: each costs as much as many examples.
_OPTIONS = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@_OPTIONS
@given(cases())
def test_random_programs(case):
    try:
        check(case)
    except Rejected:
        reject()
