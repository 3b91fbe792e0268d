"""The formats in which matmuls read their operands, one object each: float16, bfloat16 and float8.

To add a format, add an object to `FORMATS`. A new way of scaling also needs its primitives, a row of `SCALINGS` in
`mpjax/kernels/scaled_matmul.py`. Policies, plans, the rewriting and reports know a format by its object only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.program import compat

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A format of matmul operands.

    Args:
        name: Its name in policies and reports.
        short: Its abbreviation in policies.
        dtype: The dtype of the elements of operands.
        slow_on: `slow_on(device)` is a sentence about a device without units for it, with the remedy; empty if it has
            them.
        compute: For a format with scales, the compute dtype that holds the results; empty for a compute dtype itself.
        scaling: How operands are scaled: `"tensor"` by one number for each array; empty for a format without scales.
        cotangents: The dtypes that cotangents may have, by the names of options; the first is the default.
        multiple: A scaled matmul needs sizes that are multiples of this number.
    """

    name: str
    short: str
    dtype: np.dtype
    slow_on: Callable[[Any], str] = lambda device: ""
    compute: str = ""
    scaling: str = ""
    cotangents: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    multiple: int = 1

    @property
    def is_scaled(self) -> bool:
        """Whether its operands have scales, so that a policy names it beside a compute dtype."""
        return bool(self.scaling)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a policy accepts."""
        return self.name, self.short, self.dtype.name


def _float16_slow_on(device: Any) -> str:
    if compat.platform() != "tpu":
        return ""
    return (
        "float16 is no faster than bfloat16 on a TPU, takes as much memory, and needs loss scaling; use "
        "policy='mixed_bfloat16'."
    )


def _capability(device: Any) -> str:
    """The compute capability of a GPU, such as `9.0` or `gfx942`; empty for other devices."""
    on_gpu = device.platform in ("gpu", "cuda", "rocm")
    return str(getattr(device, "compute_capability", "") or "") if on_gpu else ""


def _number(capability: str) -> float | None:
    return float(capability) if capability.replace(".", "", 1).isdigit() else None


def _bfloat16_slow_on(device: Any) -> str:
    capability = _capability(device)
    number = _number(capability)
    if number is None or number >= 8.0:
        return ""
    return (
        f"{device.device_kind} (compute capability {capability}) has no bfloat16 Tensor Cores; "
        "use policy='mixed_float16' with mpjax.dynamic_loss_scale."
    )


# AMD's architectures with units for float8_e4m3fn: MI350 and RDNA 4, but not MI300, whose float8 dtypes are others.
# Source: XLA's `RocmComputeCapability::has_ocp_fp8_support`.
_AMD_FLOAT8 = ("gfx950", "gfx12")
_TPU_FLOAT8 = ("TPU7x", "TPU v7", "TPU v7x")


def _float8_slow_on(device: Any) -> str:
    capability = _capability(device)
    if (_number(capability) or 0.0) >= 8.9 or capability.startswith(_AMD_FLOAT8) or device.device_kind in _TPU_FLOAT8:
        return ""
    shown = f"{device.device_kind} (compute capability {capability})" if capability else device.device_kind
    return (
        f"{shown} is not known to have float8 matmul units. XLA widens the operands of float8 matmuls there, which is "
        "slow: use policy='mixed_bfloat16' for speed."
    )


FLOAT16 = Format("float16", "f16", np.dtype(jnp.float16), _float16_slow_on)
BFLOAT16 = Format("bfloat16", "bf16", np.dtype(jnp.bfloat16), _bfloat16_slow_on)
FLOAT8 = Format(
    "float8", "f8", E4M3, _float8_slow_on, compute="bfloat16", scaling="tensor",
    cotangents={"e5m2": E5M2, "e4m3": E4M3}, multiple=16,
)  # fmt: skip
FORMATS = (FLOAT16, BFLOAT16, FLOAT8)
HALF_DTYPES = frozenset(format.dtype for format in FORMATS if not format.is_scaled)
NAMES = tuple(format.name for format in FORMATS)  # how the names of their dtypes begin
SCALED = {format.name: format for format in FORMATS if format.is_scaled}


def format_of(dtype: Any) -> Format | None:
    """The format whose operands have a dtype; None for a dtype without one, or for None.

    Example:
        >>> format_of("bfloat16").name, format_of("float32")
        ('bfloat16', None)
    """
    return None if dtype is None else next((each for each in FORMATS if each.dtype == dtype), None)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of at most 16 bits: that of a format, or of its cotangents.

    Example:
        >>> is_narrow("float16"), is_narrow("float8_e5m2"), is_narrow("float32"), is_narrow("int8")
        (True, True, False, False)
    """
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype  # that of PRNG keys is no dtype of NumPy
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
