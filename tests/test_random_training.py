"""Random training programs: a loss scale changes nothing in float32, and a skipped step changes nothing at all.

`python -m testing.fuzz --training` runs many more of them.
"""

import collections

import jax
import pytest

from testing.random_training import Rejected, check, numbered_case
from tests.sampling import EVERY

EXAMPLES = 200
# The newest JAX runs the odd ones, the oldest the others, of which CI draws some: enough for a share of nine tenths.
NUMBERS = range(int(jax.__version_info__ >= (0, 12)), EXAMPLES, 2 * min(EVERY, 7))


@pytest.mark.slow
def test_random_training_programs():
    outcomes = collections.Counter()
    for number in NUMBERS:
        case = numbered_case(number)
        try:
            outcomes[check(case)] += 1
        except Rejected:
            outcomes["rejected"] += 1
        except AssertionError as failure:
            failure.add_note(f"example {number}:\n{case!r}")
            raise
    # Nearly all of those in float32 are compared bitwise.
    examined = sum(outcomes.values()) - outcomes["rejected"]
    assert outcomes["bitwise"] + outcomes["half"] > 0.9 * examined
    assert examined > 0.8 * len(NUMBERS)
