"""Patches of the launcher for a test, taken back after it."""

import contextlib

import jax
import pytest

from mpjax.launcher import hooks
from mpjax.launcher.options import Options


@pytest.fixture
def launched():
    """Puts JAX in the launcher's hands: `launched(policy=..., init_scale=...)` gives the session."""
    with contextlib.ExitStack() as stack:

        def launch(**options):
            patches = hooks.patch(Options(**{"quiet": True, **options}))
            stack.callback(patches.undo)
            return patches.session

        yield launch
    jax.clear_caches()
