"""Which cases of a parametrised test run."""

from __future__ import annotations

import collections
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence

# One in so many cases of each parametrised test and of each random draw; 1: all of them. Not an option of pytest: tests
# start pytest on other folders.
EVERY = int(os.environ.get("MPJAX_EVERY", "1"))
COVERING = "MPJAX_EVERY" not in os.environ
# Of a test with fewer cases, all run.
FEW = 6


def sampled(test: str, cases: Sequence[Mapping[str, str]]) -> set[int]:
    """The positions of the cases of a test that run.

    Args:
        test: Its name, by which other tests run other cases, so that each dtype and library occurs.
        cases: For each case, its value of each parameter.
    """
    if COVERING:
        alike = len({tuple(case.items()) for case in cases}) < len(cases)  # Texts that are equal may be of two values.
        whole = alike or len(cases) < FEW or len(cases[0]) == 1
        return set(range(len(cases))) if whole else set(_covering(cases))
    first = zlib.crc32(test.encode()) % min(EVERY, len(cases))
    return set(range(first, len(cases), EVERY))


# Folders whose tests run whole scripts, start processes, or compile whole steps, most of them without parameters.
WHOLE = ("tests/examples/", "tests/launcher/", "tests/planning/")
_ONE_IN = 3


def sampled_of_file(file: str, tests: int) -> set[int]:
    """The positions of the tests of a file that run, of those in which the cases to run are sampled.

    Where cases are sampled, the same tests run with the newest versions, so that one in three is enough of long ones.
    """
    if EVERY == 1 or not file.startswith(WHOLE):
        return set(range(tests))
    return set(range(zlib.crc32(file.encode()) % min(_ONE_IN, tests), tests, _ONE_IN))


def _covering(cases: Sequence[Mapping[str, str]]) -> Iterator[int]:
    """Cases in which all values of all parameters but one occur together: of three parameters, each pair of values.

    Nearly all faults that depend on a parameter depend on few of them (Kuhn, Wallace and Gallo, "Software Fault
    Interactions and Implications for Software Testing", 2004).
    """
    together = max(1, len(cases[0]) - 1)
    missing = {i: set(itertools.combinations(sorted(case.items()), together)) for i, case in enumerate(cases)}
    used = collections.Counter()
    while most := max(map(len, missing.values()), default=0):
        # Of cases that cover as much, that whose values have run least.
        alike = (i for i, new in missing.items() if len(new) == most)
        best = min(alike, key=lambda i: sum(used[value] for value in cases[i].items()))
        covered = missing.pop(best)
        for of_another in missing.values():
            of_another -= covered
        used.update(cases[best].items())
        yield best
