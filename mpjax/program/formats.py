"""The formats in which matmuls read their operands, one object each: float16, bfloat16, float8 and MXFP8.

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
        scaling: How operands are scaled: `"tensor"` by one number for each array, `"block"` by one for each block along
            the contraction; empty for a format without scales.
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
    def shares_copies(self) -> bool:
        """Whether all matmuls that read an array read the same copy, whatever they contract."""
        return self.scaling == "tensor"

    @property
    def in_policies(self) -> Any:
        """How a policy holds it: by its dtype, or by its name if another format has that dtype."""
        return self.dtype if format_of(self.dtype) is self else self.name

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
    on_gpu = getattr(device, "platform", "") in ("gpu", "cuda", "rocm")
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
    if not hasattr(device, "compute_capability") and device.device_kind.startswith("NVIDIA"):
        return ""  # A device that is not present is described by its kind, which does not say.
    if (_number(capability) or 0.0) >= 8.9 or capability.startswith(_AMD_FLOAT8) or device.device_kind in _TPU_FLOAT8:
        return ""
    shown = f"{device.device_kind} (compute capability {capability})" if capability else device.device_kind
    return (
        f"{shown} is not known to have float8 matmul units. XLA widens the operands of float8 matmuls there, which is "
        "slow: use policy='mixed_bfloat16' for speed."
    )


_MXFP8_GPUS = ("B100", "B200", "B300")  # also as GB200 and GB300; the kind alone describes a device that is not present


def multiplies_blocks(device: Any) -> bool:
    """Whether a device multiplies operands in MXFP8 itself: GPUs of compute capability 10."""
    return _capability(device).startswith("10.") or device.device_kind.endswith(_MXFP8_GPUS)


def _mxfp8_slow_on(device: Any) -> str:
    if multiplies_blocks(device):
        return ""
    return (
        f"{device.device_kind} is not known to multiply MXFP8 (NVIDIA's B200 and B300 do). Operands of its matmuls are "
        "rounded to it and widened there, which is slow: use policy='mixed_bfloat16' for speed."
    )


FLOAT16 = Format("float16", "f16", np.dtype(jnp.float16), _float16_slow_on)
BFLOAT16 = Format("bfloat16", "bf16", np.dtype(jnp.bfloat16), _bfloat16_slow_on)
FLOAT8 = Format(
    "float8", "f8", E4M3, _float8_slow_on, compute="bfloat16", scaling="tensor",
    cotangents={"e5m2": E5M2, "e4m3": E4M3}, multiple=16,
)  # fmt: skip
MXFP8 = Format(
    "mxfp8", "mx8", E4M3, _mxfp8_slow_on, compute="bfloat16", scaling="block",
    cotangents={"e4m3": E4M3, "e5m2": E5M2}, multiple=32,
)  # fmt: skip
FORMATS = (FLOAT16, BFLOAT16, FLOAT8, MXFP8)
HALF_DTYPES = frozenset(format.dtype for format in FORMATS if not format.is_scaled)
NAMES = tuple(format.name for format in FORMATS)  # how the names of their dtypes begin
SCALED = {format.name: format for format in FORMATS if format.is_scaled}


def format_of(dtype: Any) -> Format | None:
    """The format of operands with a dtype, or with a name; None for a dtype without one, or for None.

    Example:
        >>> format_of("bfloat16").name, format_of("mxfp8").name, format_of("float32")
        ('bfloat16', 'mxfp8', None)
    """
    if dtype is None:
        return None
    return next((each for each in FORMATS if dtype in (each.name, each.dtype)), None)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of at most 16 bits: that of a format, or of its cotangents.

    Example:
        >>> is_narrow("float16"), is_narrow("float8_e5m2"), is_narrow("float32"), is_narrow("int8")
        (True, True, False, False)
    """
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype  # that of PRNG keys is no dtype of NumPy
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
