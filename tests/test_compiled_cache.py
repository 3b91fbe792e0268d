"""The cache of compiled programs that the processes of a run share."""

from concurrent.futures import ThreadPoolExecutor

from jax._src.lru_cache import LRUCache


def test_a_program_is_read_whole_while_another_process_writes_it(tmp_path):
    cache, program = LRUCache(str(tmp_path), max_size=-1), bytes(2**27)
    read = {0}
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(cache.put, "key", program)
        while not writing.done():
            read.add(len(cache.get("key") or b""))
    assert read <= {0, len(program)}
    assert cache.get("key") == program
    assert [file.name for file in tmp_path.iterdir()] == ["key-cache"]
