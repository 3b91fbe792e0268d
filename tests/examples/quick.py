"""Makes runs of the scripts quicker without changing what they train."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator

import jax
import pytest

from testing import cheap_keys


def make_quick(patch: pytest.MonkeyPatch) -> None:
    """Draws random numbers from a hash, which compiles in half the time."""
    cheap_keys.make_default(patch)


@contextlib.contextmanager
def compiled_steps(caplog: pytest.LogCaptureFixture) -> Iterator[Counter[str]]:
    """Counts how often each step is compiled, in any thread."""
    found = Counter[str]()
    jax.config.update("jax_log_compiles", True)
    try:
        yield found
    finally:
        jax.config.update("jax_log_compiles", False)
    found.update(re.findall(r"Finished XLA compilation of jit\((\w+_step)\)", caplog.text))
