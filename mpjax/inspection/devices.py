"""Published peak rates of GPUs and TPUs."""

from __future__ import annotations

import dataclasses
import difflib
import math


@dataclasses.dataclass(frozen=True)
class Device:
    """Published peak rates of one device, dense (without structured sparsity).

    Args:
        name: The key in `DEVICES`.
        bandwidth: Memory bandwidth in bytes per second.
        float16, bfloat16: FLOP/s on Tensor Cores (matrix cores, MXUs) with float32 accumulation, as XLA uses them.
            The float32 rate where the device has none for the dtype (bfloat16 before Ampere).
        tfloat32: FLOP/s of float32 matmuls at JAX's default precision: TF32 on GPUs that have it, one bfloat16 pass on
            TPUs.
        float32, float64: FLOP/s at full precision (float64 on Tensor Cores that support it).
        source: The document that states these figures.
    """

    name: str
    bandwidth: float
    float16: float
    bfloat16: float
    tfloat32: float
    float32: float
    float64: float
    source: str

    @property
    def is_tpu(self) -> bool:
        """Whether it multiplies float32 in bfloat16 passes: one by default, three at HIGH, six at HIGHEST."""
        return self.name.startswith("TPU")

    def peak(self, dtype: str, precision: str = "") -> float:
        """Peak FLOP/s of a matmul with operands of `dtype`, at JAX's default precision or a higher one."""
        if dtype == "float32" and precision.upper() != "HIGHEST":
            return self.tfloat32 / (3 if self.is_tpu and precision else 1)
        # float8 and other dtypes are at least as fast as half precision.
        return getattr(self, dtype, self.float16)


def _gpu(name: str, bandwidth: float, half: float, rates: tuple[float, float, float], source: str) -> Device:
    """A GPU from its GB/s, its TFLOP/s in half precision, and its TFLOP/s in TF32, float32 and float64."""
    tfloat32, float32, float64 = (1e12 * rate for rate in rates)
    return Device(name, 1e9 * bandwidth, 1e12 * half, 1e12 * half, tfloat32, float32, float64, source)


def _without_bfloat16(device: Device) -> Device:
    return dataclasses.replace(device, bfloat16=device.float32)


def _tpu(name: str, bandwidth: float, bfloat16: float, source: str) -> Device:
    """One TPU chip. Full float32 precision takes six bfloat16 passes. Emulated float64 is not faster than that."""
    half, full = 1e12 * bfloat16, 1e12 * bfloat16 / 6
    return Device(name, 1e9 * bandwidth, half, half, half, full, full, source)


DEVICES = {
    device.name: device
    for device in (
        _without_bfloat16(_gpu("V100", 900, 125, (15.7, 15.7, 7.8), "NVIDIA Tesla V100 datasheet (SXM2)")),
        _without_bfloat16(_gpu("T4", 320, 65, (8.1, 8.1, 0.25), "NVIDIA T4 datasheet")),
        _gpu("A100", 2039, 312, (156, 19.5, 19.5), "NVIDIA A100 datasheet (SXM, 80 GB)"),
        _gpu("L4", 300, 121, (60, 30.3, 0.47), "NVIDIA L4 datasheet"),
        _gpu("L40S", 864, 362, (183, 91.6, 1.4), "NVIDIA L40S datasheet"),
        _gpu("H100", 3350, 989.4, (494.7, 67, 67), "NVIDIA H100 datasheet (SXM)"),
        _gpu("H200", 4800, 989.4, (494.7, 67, 67), "NVIDIA H200 datasheet (SXM)"),
        _gpu("B200", 8000, 2250, (1125, 75, 37), "NVIDIA HGX B200 datasheet (one of its eight GPUs)"),
        _gpu("GB200", 8000, 2500, (1250, 80, 40), "NVIDIA GB200 NVL72 datasheet (one of its 72 GPUs)"),
        _gpu("A100 40GB", 1555, 312, (156, 19.5, 19.5), "NVIDIA A100 datasheet (SXM, 40 GB)"),
        _gpu("H100 PCIe", 2000, 756, (378, 51, 51), "NVIDIA H100 datasheet (PCIe)"),
        _gpu("A10G", 600, 70, (35, 35, 0.55), "NVIDIA A10G datasheet (of AWS G5; float64: 1/64 of float32)"),
        _gpu("RTX 3090", 936, 71, (35.6, 35.6, 0.56), "NVIDIA Ampere GA102 GPU architecture whitepaper"),
        _gpu("RTX 4090", 1008, 165.2, (82.6, 82.6, 1.29), "NVIDIA Ada GPU architecture whitepaper"),
        _gpu("RTX 5090", 1792, 209.5, (104.8, 104.8, 1.64), "NVIDIA RTX Blackwell GPU architecture whitepaper"),
        _gpu("MI250X", 3277, 383, (95.7, 95.7, 95.7), "AMD Instinct MI250X datasheet (both dies)"),
        _gpu("MI300X", 5300, 1307.4, (653.7, 163.4, 163.4), "AMD Instinct MI300X datasheet"),
        _tpu("TPU v4", 1228, 275, "Google Cloud documentation, TPU v4"),
        _tpu("TPU v5e", 819, 197, "Google Cloud documentation, TPU v5e"),
        _tpu("TPU v5p", 2765, 459, "Google Cloud documentation, TPU v5p"),
        _tpu("TPU v6e", 1638, 918, "Google Cloud documentation, TPU v6e"),
    )
}
# JAX's `device_kind` where it differs from the table's name.
_KINDS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def device_of(name: str) -> Device:
    """Looks up a device by name or JAX `device_kind` (`"NVIDIA H200"`), or makes one from three numbers.

    Args:
        name: A key of `DEVICES`, a `device_kind`, or `"GB/s,TFLOP/s,TFLOP/s"` for any other device: its memory
            bandwidth, its rate in half precision and its rate in float32.

    Raises:
        ValueError: `name` is none of these.

    Example:
        >>> device_of("NVIDIA A100-SXM4-80GB").name, device_of("TPU v5 lite").name
        ('A100', 'TPU v5e')
        >>> device_of("2000,300,40").float16
        300000000000000.0
    """
    if "," in name:
        return _of_numbers(name)
    words = _words(name)
    known = {key: DEVICES[device] for key, device in ({key: key for key in DEVICES} | _KINDS).items()}
    found = [key for key in known if _words(key) <= words]
    if found:
        return known[max(found, key=lambda key: len(_words(key)))]  # "A100 40GB" rather than "A100"
    close = difflib.get_close_matches(name.upper(), DEVICES, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"{name!r} is not a device with known peak rates{hint}; there are {', '.join(DEVICES)}. Describe any other "
        "device by three numbers, 'GB/s,TFLOP/s,TFLOP/s': its memory bandwidth, and its rates in half and float32."
    )


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def _of_numbers(text: str) -> Device:
    try:
        bandwidth, half, full = map(float, text.split(","))
    except ValueError:
        bandwidth = half = full = math.nan
    if not all(math.isfinite(x) and x > 0 for x in (bandwidth, half, full)):
        raise ValueError(
            f"{text!r}: describe a device by three positive numbers, such as '2000,300,40': memory bandwidth in GB/s, "
            "TFLOP/s in half and TFLOP/s in float32."
        )
    return _gpu(f"{bandwidth:g} GB/s, {half:g} and {full:g} TFLOP/s", bandwidth, half, (full, full, full), "its user")
