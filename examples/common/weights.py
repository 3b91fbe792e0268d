"""Weight files: exports for inference, and named arrays to initialize a training.

Names and shapes are checked in a file's header before any array is read. Otherwise a malicious file could claim any
amount of memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from examples.common.cli import UsageError, disk_problem, listing, one_line, optional, process_id
from examples.common.training import Variables

Shapes = dict[str, tuple[int, ...]]
Reader = Callable[[str], np.ndarray]

_ABOUT = "mpjax_example"  # the key of the metadata


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as `params/stem/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in leaves}


def cast_weights(variables: Variables, dtype: str) -> Variables:
    """Casts variables for inference: parameters to `dtype`, statistics stay float32.

    Raises:
        UsageError: A parameter is out of the range of `dtype`. The text names it.
    """
    cast = mpjax.get_policy(f"params={dtype},compute={dtype},output=float32").cast_to_param
    # Jitted: separate operations would compile once per shape.
    params = jax.jit(cast)(variables.params)
    finite = jax.jit(lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(), params))(params)
    if name := next((name for name, is_finite in named(jax.device_get(finite)).items() if not is_finite), None):
        raise UsageError(f"--export {dtype}: the parameter {name} is out of range; use bfloat16 or float32.")
    return Variables(params, variables.stats)


def write_weights(path: Path, variables: Variables, about: Mapping[str, Any]) -> None:
    """Writes a .safetensors file atomically, with the metadata needed to use the weights."""
    from safetensors.flax import save_file

    part, variables = path.with_name(path.name + ".part"), jax.device_get(variables)
    if process_id():
        return
    try:
        save_file(named(variables._asdict()), str(part), {_ABOUT: json.dumps(about)})
        os.replace(part, path)
    except Exception as error:
        raise UsageError(f"{str(path)!r} can't be written: {disk_problem(error) or one_line(error)}.") from error


def read_about(path: Path) -> dict[str, Any]:
    """Reads the metadata that `write_weights` wrote, from the header alone.

    Raises:
        UsageError: The file can't be read or was not written by --export.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(path), "flax") as file:
            return json.loads((file.metadata() or {})[_ABOUT])
    except Exception as error:
        raise UsageError(f"--weights {str(path)!r} was not written by --export: {one_line(error, 200)}") from error


class Arrays(NamedTuple):
    """Arrays by name, of which each is read when it is needed."""

    source: str  # for messages
    shapes: Shapes
    read: Callable[[str], Any]

    def variables(
        self,
        like: Variables,
        names: Mapping[str, str] | None = None,
        convert: Callable[[Any], Any] = lambda array: array,
        keep: Collection[str] = (),
    ) -> Variables:
        """The arrays as variables, on the host.

        Args:
            like: Variables with the expected names (those of `named`, with or without the prefix `params/` or
                `stats/`), shapes and dtypes.
            names: Maps names of `like` to those of the arrays, if they differ.
            convert: Applied to each array.
            keep: Names whose values are taken from `like`.

        Raises:
            UsageError: An array is missing, or has another shape.
        """
        wanted, remedy = named(like._asdict()), "give the --model and the data that it is for."
        found: dict[str, str] = {}
        for name in wanted:
            candidates = (names[name],) if names else (name, name.partition("/")[2])
            found[name] = next((own for own in candidates if own in self.shapes), "")
        if missing := [name for name, own in found.items() if not own]:
            there = f"of this model; it holds {listing([*self.shapes])}; {remedy}"
            raise UsageError(f"{self.source} lacks {listing(missing)} {there}")
        leaves = []
        for name, own in found.items():
            if name in keep:
                leaves.append(wanted[name])
                continue
            # A broadcast scalar has the shape but takes no memory, whatever a file claims.
            shape = convert(np.broadcast_to(np.float32(0), self.shapes[own])).shape
            if shape != wanted[name].shape:
                fit = f"which does not fit {wanted[name].shape} of this model's {name!r}"
                raise UsageError(f"{self.source}: {own!r} has shape {self.shapes[own]}, {fit}; {remedy}")
            leaves.append(jnp.asarray(convert(self.read(own))).astype(wanted[name].dtype))
        return jax.device_get(jax.tree.unflatten(jax.tree.structure(like), leaves))


def open_arrays(path: Path, flag: str) -> Arrays:
    """The arrays of a .safetensors or .pth file, without the prefix of torch's DataParallel.

    Args:
        path: The file.
        flag: The flag that names it, for messages.

    Raises:
        UsageError: The file can't be read.
    """
    try:
        shapes, read = (_open_torch if path.suffix in (".pth", ".pt", ".bin") else _open_safetensors)(path)
    except UsageError:
        raise
    except Exception as error:
        why = one_line(error, 200)
        raise UsageError(f"{flag} {str(path)!r} can't be read as .safetensors or .pth: {why}") from error
    names = {name.removeprefix("module."): name for name in shapes}
    own_shapes = {name: shapes[own] for name, own in names.items()}
    return Arrays(f"{flag} {str(path)!r}", own_shapes, lambda name: read(names[name]))


def _open_safetensors(path: Path) -> tuple[Shapes, Reader]:
    from safetensors import safe_open

    file = safe_open(str(path), "flax")
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, file.get_tensor  # noqa: SIM118 - the file has no iterator


def _open_torch(path: Path) -> tuple[Shapes, Reader]:
    save = f"safetensors.torch.save_file(torch.load({str(path)!r}, weights_only=True), 'weights.safetensors')"
    torch = optional("torch", f"{str(path)!r} needs torch to be read. Install it, or where it is, run {save}.")
    found = torch.load(path, map_location="cpu", weights_only=True)  # without it, a file could run code
    for key in ("state_dict", "model", "model_state_dict"):
        found = found.get(key, found)
    tensors = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    return {name: tuple(x.shape) for name, x in tensors.items()}, lambda name: tensors[name].float().numpy()
