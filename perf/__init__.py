"""Timing, memory and the environment, as the example scripts and the benchmarks measure and record them."""
