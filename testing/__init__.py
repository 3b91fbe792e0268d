"""What tests and benchmarks share: the zoo of programs, and counters that are independent of mpjax's own."""
