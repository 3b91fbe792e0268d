"""Code shared by tests and benchmarks: the zoo of programs, and counters independent of mpjax's own."""
