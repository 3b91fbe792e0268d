"""Orbax checkpoints of a training state and its position in the data, with checksums of both."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from examples.common.cli import UsageError, disk_problem, one_line, process_id, say
from examples.common.processes import gather

Restored = tuple[Any, dict[str, Any]]  # a state and its position


class Checkpoints:
    """The newest checkpoints of a run. As a context manager, it waits for pending writes on exit.

    Args:
        folder: The folder, which holds a subfolder for each step.
        keep: Number of checkpoints to keep.
        clean: Whether to remove what killed writes have left. Not beside a process that may be writing.
    """

    def __init__(self, folder: Path, keep: int = 2, clean: bool = False) -> None:
        self._folder = folder.absolute()
        # Of its own, or the processes would mistake a write here for one of the best epoch's at the same time.
        barriers = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=self._folder.name)
        own: dict[str, Any] = {"cleanup_tmp_directories": clean, "multiprocessing_options": barriers}
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, **own)
        with _writing(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that is propagating matters more.
        with _writing(self._folder) if kind is None else contextlib.suppress(Exception):
            self._manager.wait_until_finished()
            self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, intact or damaged, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Saves in the background. `state` may be donated as soon as this returns.

        Args:
            step: The number of steps taken, which names the checkpoint.
            state: A pytree of arrays.
            position: Position in the data of the next step, as JSON.

        Raises:
            UsageError: The disk is full, or the folder can't be written to.
        """
        if step in self._manager.all_steps():
            return
        stored = record(state, position)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(stored))
        with _writing(self._folder):
            self._manager.save(step, args=items)

    def restore(self, like: Callable[[dict[str, Any]], Any], *, resume: bool = False) -> Restored | None:
        """Restores the newest readable state and its position. Returns None if nothing was saved yet.

        Args:
            like: Called with the position, returns a state with the saved structure, of arrays or of
                `jax.ShapeDtypeStruct`s with shardings. The restored arrays have its shapes, dtypes and shardings.
            resume: Whether training continues from here. Newer checkpoints are then moved to a folder beside this one,
                since their steps will run again.

        Raises:
            UsageError: No checkpoint can be read as this model.
        """
        problems: list[str] = []
        for candidate in reversed(self.steps):
            try:
                restored = self._read(candidate, like)
            except UsageError:
                raise
            except Exception as error:
                problems.append(f"step {candidate}: {one_line(error, 200)}")
                continue
            if problems:
                say(f"damaged checkpoint ({'; '.join(problems)}): step {candidate} is the newest that can be read")
            if resume:
                self.set_aside_after(candidate)
            return restored
        if not problems:
            return None
        remedy = f"Give the flags that it was trained with, or another folder.{self._of_best(like)}"
        where = f"no checkpoint in {str(self._folder)!r} can be read as this model"
        raise UsageError(f"{where} ({'; '.join(problems)}). {remedy}")

    def _of_best(self, like: Callable[[dict[str, Any]], Any]) -> str:
        """Names the checkpoint of the best epoch beside this folder, if that can be read."""
        folder = self._folder.with_name("best")
        if folder != self._folder and folder.is_dir():
            with Checkpoints(folder, 1) as best, contextlib.suppress(UsageError):
                if best.restore(like):
                    return f" That of the best epoch, in {str(folder)!r}, is intact: --mode evaluate --best."
        return ""

    def _read(self, step: int, like: Callable[[dict[str, Any]], Any]) -> Restored:
        stored = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        position = stored["position"]
        if stored["position_checksum"] != _text_checksum(position):
            raise ValueError("the position differs from what was saved")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like(position)))
        found = self._manager.restore(step, args=args)
        sums, saved = record(found["state"], {})["array_checksums"], stored["array_checksums"]
        if differing := [name for name in {**sums, **saved} if sums.get(name) != saved.get(name)]:
            raise ValueError(f"{', '.join(differing[:3])} differ from what was saved")
        return found["state"], position

    def set_aside_after(self, step: int) -> None:
        """Moves checkpoints of later steps, which will run again, to a folder beside this one."""
        steps = [other for other in self.steps if other > step]
        if not steps:
            return
        aside = self._folder.with_name(f"{self._folder.name}_set_aside")
        for step in steps if process_id() == 0 else ():
            aside.mkdir(exist_ok=True)
            number = sum(path.name.startswith(f"{step}-") for path in aside.iterdir())
            os.replace(self._folder / str(step), aside / f"{step}-{number}")
        gather(None)  # None looks before the first has moved them.
        self._manager.reload()
        say(f"checkpoints of later steps ({', '.join(map(str, steps))}) are now in {aside}")


def newest_position(folder: Path) -> dict[str, Any]:
    """The position in the newest checkpoint of a folder whose record is intact; empty if there is none.

    Read without Orbax, which would start JAX's devices: the flags of a run may say which.
    """
    steps = (path for path in folder.glob("*") if path.name.isdecimal())
    for step in sorted(steps, key=lambda path: int(path.name), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads((step / "record" / "metadata").read_text())
            if stored["position_checksum"] == _text_checksum(stored["position"]):
                return stored["position"]
    return {}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Reports a problem of the disk in words."""
    try:
        yield
    except Exception as error:
        if (why := disk_problem(error)) is None:
            raise
        remedy = "Free disk space or use another folder; --resume continues from the last complete checkpoint."
        raise UsageError(f"a checkpoint can't be written to {str(folder)!r}: {why}. {remedy}") from error


# Checksums of a state's arrays, computed where the arrays are. Orbax stores none, so it restores a flipped bit.

_GOLDEN = 0x9E3779B1  # consecutive multiples of it are spread over all 32-bit numbers (Knuth)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
def _checksums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of the array's words, each times an odd number of its own, modulo 2**32.

    An odd factor keeps every bit: any change of a single word changes the sum.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # row-major, without a reshape that would gather a sharded array
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(words * (index * jnp.uint32(_GOLDEN) | jnp.uint32(1)), dtype=jnp.uint32)


def record(state: Any, position: dict[str, Any]) -> dict[str, Any]:
    """What is stored beside a state: the position, and checksums of both."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_checksums([x for _, x in leaves]))
    arrays = {jax.tree_util.keystr(path): int(x) for (path, _), x in zip(leaves, sums, strict=True)}
    return {"position": position, "position_checksum": _text_checksum(position), "array_checksums": arrays}


def _text_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
