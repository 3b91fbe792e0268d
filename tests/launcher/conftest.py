"""Writes scripts; applies the launcher's patches for a test and undoes them afterwards."""

import contextlib
import textwrap

import jax
import pytest

from mpjax.launcher import hooks
from mpjax.launcher.options import Options


@pytest.fixture
def launched():
    """Patches JAX like the launcher: `launched(policy=..., init_scale=...)` returns the session.

    With `wherever=True`, gradients are cast wherever they go, for tests that no optimizer should complicate.
    """
    with contextlib.ExitStack() as stack:

        def launch(wherever=False, **options):
            patches = hooks.patch(Options(**{"quiet": True, **options}))
            stack.callback(patches.undo)
            patches.session.any_gradient |= wherever
            return patches.session

        yield launch
    jax.clear_caches()


@pytest.fixture
def script(tmp_path):
    """Writes a script, and returns its path."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
