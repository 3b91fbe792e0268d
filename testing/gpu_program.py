"""A training step with an embedding, a loop, a convolution and a branch, compiled by XLA for an H200.

Source locations and the schedule are removed. For tests on machines without a GPU.
"""

from pathlib import Path

GPU_PROGRAM = Path(__file__).with_suffix(".hlo").read_text()
