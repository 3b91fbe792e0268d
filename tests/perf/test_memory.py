"""Which errors report a full device."""

from perf.memory import is_out_of_memory


def test_out_of_memory_is_distinguished_from_other_errors():
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"))
    assert not is_out_of_memory(RuntimeError("INVALID_ARGUMENT"))
