"""The zoo: float32 training programs of many kinds, which automatic mixed precision must accept unchanged.

Tests and benchmarks iterate over `REGISTRY`. To add a program, write one function under `@program()` in the file of
its family.
"""

from . import libraries, linen, loops, nnx, parallel, plain, rules, sequences, sides  # noqa: F401 (importing them fills the registry)
from .program import REGISTRY, Program

__all__ = ["REGISTRY", "Program"]
