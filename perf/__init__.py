"""Timing, memory and environment measurements for the example scripts and the benchmarks."""
