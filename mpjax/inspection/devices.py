"""Published peak rates of GPUs."""

from __future__ import annotations

import dataclasses
import difflib


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak rates of one GPU, dense (without structured sparsity), as its maker publishes them.

    Args:
        name: as in `DEVICES`.
        bandwidth: of its memory, in bytes a second.
        float16, bfloat16: FLOP/s on Tensor Cores; without such (bfloat16 before Ampere) those of float32.
        tfloat32: FLOP/s of float32 matmuls at JAX's default precision, which is TF32 where there is one.
        float32, float64: FLOP/s at full precision.
        source: the document that has these figures.
    """

    name: str
    bandwidth: float
    float16: float
    bfloat16: float
    tfloat32: float
    float32: float
    float64: float
    source: str

    def peak(self, dtype: str, precision: str = "") -> float:
        """FLOP/s of a matmul with operands of a dtype, at JAX's default precision or a higher one."""
        if dtype == "float32" and not precision:
            return self.tfloat32
        # float8 and others run at no less than half's rate.
        return getattr(self, dtype, self.float16)


def _device(name: str, bandwidth: float, half: float, rates: tuple[float, float, float], source: str) -> Device:
    tfloat32, float32, float64 = (1e12 * rate for rate in rates)
    bfloat16 = 1e12 * half if tfloat32 > float32 or name not in ("V100", "T4") else float32
    return Device(name, 1e9 * bandwidth, 1e12 * half, bfloat16, tfloat32, float32, float64, source)


# TFLOP/s of half; of TF32, float32 and float64.
DEVICES = {
    device.name: device
    for device in (
        _device("V100", 900, 125, (15.7, 15.7, 7.8), "NVIDIA Tesla V100 datasheet (SXM2)"),
        _device("T4", 320, 65, (8.1, 8.1, 0.25), "NVIDIA T4 datasheet"),
        _device("A100", 2039, 312, (156, 19.5, 9.7), "NVIDIA A100 datasheet (SXM, 80 GB)"),
        _device("L4", 300, 121, (60, 30.3, 0.47), "NVIDIA L4 datasheet"),
        _device("L40S", 864, 362, (183, 91.6, 1.4), "NVIDIA L40S datasheet"),
        _device("H100", 3350, 989.5, (494.7, 67, 34), "NVIDIA H100 datasheet (SXM)"),
        _device("H200", 4800, 989.5, (494.7, 67, 34), "NVIDIA H200 datasheet (SXM)"),
    )
}


def device_of(name: str) -> Device:
    """The device of a name, or the one that a JAX `device_kind` names (`"NVIDIA H200"`).

    Raises:
        ValueError: it is none of `DEVICES`.

    Example:
        >>> device_of("NVIDIA A100-SXM4-80GB").name
        'A100'
    """
    words = name.upper().replace("-", " ").split()
    for known, device in DEVICES.items():
        if known in words:
            return device
    close = difflib.get_close_matches(name.upper(), DEVICES, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"{name!r} is no device whose peak rates are known{hint}; there are {', '.join(DEVICES)}.")
