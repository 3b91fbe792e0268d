"""Checkpoints that are damaged, not requested, or can't be written."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError


def state(step):
    return {"step": jnp.int32(step), "params": {"w": jnp.arange(100.0) + step}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {"epoch": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def truncate(step):
    for path in step.rglob("*"):
        if path.is_file() and "ocdbt" in str(path):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_files(step):
    for path in step.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def empty_folder(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    "truncated": truncate,
    "zero bytes": empty_files,
    "empty folder": empty_folder,
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no record": lambda step: shutil.rmtree(step / "record"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_resumes_from_the_newest_intact_checkpoint(folder, damage, capfd):
    DAMAGES[damage](folder / "3")
    with Checkpoints(folder, keep=3) as checkpoints:
        restored, position = checkpoints.restore(lambda position: state(0), resume=True)
        assert (int(restored["step"]), position) == (2, {"epoch": 2})
        # Step 3 runs again, and must be saved again.
        checkpoints.save(3, state(3), {"epoch": 30})
    out, err = capfd.readouterr()
    assert out.count("damaged checkpoint (step 3: ") == 1
    assert "Traceback" not in out + err
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.restore(lambda position: state(0))[1] == {"epoch": 30}
    assert (folder.parent / "checkpoints_set_aside" / "3-0").is_dir()


def damage_at_random(step, rng):
    """Flips a bit of a random file, or sets a block of it to zeros."""
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[rng.integers(len(files))]
    content = bytearray(path.read_bytes())
    at = int(rng.integers(len(content)))
    if rng.random() < 0.7:
        content[at] ^= 1 << int(rng.integers(8))
    else:
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    path.write_bytes(content)


DAMAGED_AT_RANDOM = int(os.environ.get("MPJAX_DAMAGES", "30"))


def test_no_random_damage_is_silent(saved, tmp_path, capfd):
    outcomes = []
    for number in range(DAMAGED_AT_RANDOM):
        folder = shutil.copytree(saved, tmp_path / str(number))
        damage_at_random(folder / "3", np.random.default_rng(number))
        with Checkpoints(folder, keep=3) as checkpoints:
            restored, position = checkpoints.restore(lambda position: state(0))
        step = position["epoch"]
        outcomes.append(step)
        for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state(step)), strict=True):
            assert np.array_equal(got, want), number
        assert ("damaged checkpoint (step 3: " in capfd.readouterr().out) == (step != 3), number
        shutil.rmtree(folder)
    assert 2 in outcomes  # the damage of some is found; much of a file is padding and metadata


def test_reading_a_checkpoint_moves_nothing(folder):
    truncate(folder / "3")
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.restore(lambda position: state(0))[1] == {"epoch": 2}
        assert checkpoints.steps == [1, 2, 3]


def test_another_model_is_an_error_but_a_missing_checkpoint_is_not(folder, tmp_path):
    with Checkpoints(folder, keep=3) as checkpoints, pytest.raises(UsageError, match="can be read as this model"):
        checkpoints.restore(lambda position: {"other": jnp.zeros(3)})
    with Checkpoints(tmp_path / "none") as checkpoints:
        assert checkpoints.restore(lambda position: state(0)) is None


@contextlib.contextmanager
def file_limit(size):
    """Writing more than `size` bytes to a file fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("steps", [1, 2])
def test_file_that_is_too_large_is_reported_in_one_line(steps, tmp_path):
    """The error comes at the end, or with the save after that of a write in the background."""
    large = {"w": jax.random.normal(jax.random.key(0), (300_000,))}
    with (
        pytest.raises(UsageError, match=r"can't be written to .*: File too large\. Free disk space"),
        file_limit(100_000),
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
    ):
        [checkpoints.save(step, large, {}) for step in range(steps)]


def test_an_intact_best_checkpoint_is_named(saved, tmp_path):
    folder, best = (shutil.copytree(saved, tmp_path / name) for name in ("checkpoints", "best"))
    for step in folder.iterdir():
        empty_files(step)
    for expected in ("is intact: --mode evaluate --best", None):
        with Checkpoints(folder, keep=3) as checkpoints, pytest.raises(UsageError) as error:
            checkpoints.restore(lambda position: state(0))
        assert ("is intact" in str(error.value)) == (expected is not None)
        for step in best.iterdir():
            empty_files(step)
