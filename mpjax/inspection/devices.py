"""Published peak rates of GPUs and TPUs."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import pathlib

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """Published peak rates of one device, dense (without structured sparsity).

    Args:
        name: The key in `DEVICES`.
        source: The document that states these figures.
        bandwidth: Memory bandwidth in bytes per second.
        float8: FLOP/s of float8 matmuls with float32 accumulation; the rate of float16 where the device has none.
        float16, bfloat16: FLOP/s on Tensor Cores (matrix cores, MXUs) with float32 accumulation, as XLA uses them.
            The float32 rate where the device has none for the dtype (bfloat16 before Ampere).
        tfloat32: FLOP/s of float32 matmuls at JAX's default precision: TF32 on GPUs that have it, one bfloat16 pass on
            TPUs.
        float32, float64: FLOP/s at full precision (float64 on Tensor Cores that support it).
    """

    name: str
    source: str
    bandwidth: float
    float8: float
    float16: float
    bfloat16: float
    tfloat32: float
    float32: float
    float64: float

    @property
    def is_tpu(self) -> bool:
        """Whether it multiplies float32 in bfloat16 passes: one by default, three at HIGH, six at HIGHEST."""
        return self.name.startswith("TPU")

    def peak(self, dtype: str, precision: str = "") -> float:
        """Peak FLOP/s of a matmul with operands of `dtype`, at JAX's default precision or a higher one."""
        if dtype == "float32" and precision.upper() != "HIGHEST":
            return self.tfloat32 / (3 if self.is_tpu and precision else 1)
        # Other dtypes, as of integers, are at least as fast as half precision.
        return self.float8 if dtype.startswith("float8") else getattr(self, dtype, self.float16)


# A TPU, whose last rates are empty, takes six bfloat16 passes for float32, and is not faster in float64.
_, *_ROWS = csv.reader(pathlib.Path(__file__).with_suffix(".csv").read_text().splitlines())
DEVICES = {
    name: Device(
        name, source, float(bandwidth), float(float8 or rates[0]), *(float(x or float(rates[1]) / 6) for x in rates)
    )
    for name, source, bandwidth, float8, *rates in _ROWS
}
# JAX's `device_kind` where it differs from the table's name.
_KINDS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def device_of(name: str) -> Device:
    """Looks up a device by name (a key of `DEVICES`) or by JAX's `device_kind` (`"NVIDIA H200"`).

    Raises:
        ValueError: `name` is none of these.

    Example:
        >>> device_of("NVIDIA A100-SXM4-80GB").name, device_of("TPU v5 lite").name
        ('A100', 'TPU v5e')
    """
    known = DEVICES | {kind: DEVICES[device] for kind, device in _KINDS.items()}
    if found := [key for key in known if _words(key) <= _words(name)]:
        return known[max(found, key=lambda key: len(_words(key)))]  # "A100 40GB" rather than "A100"
    close = difflib.get_close_matches(name.upper(), DEVICES, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"{name!r} is not a device with known peak rates{hint}; there are {', '.join(DEVICES)}. Give the one that is "
        "most like it."
    )


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def local_device() -> str:
    """The name in `DEVICES` of JAX's default device; empty if its peak rates are not known."""
    try:
        return device_of(jax.devices()[0].device_kind).name
    except ValueError:
        return ""
