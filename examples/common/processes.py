"""Several processes of one training, on one machine or many: they join, agree, and end together.

`jax.distributed` connects them. Its store of small texts carries what a process must tell the others before or beside
the device programs; the public API has no such way, so this module uses the client that Orbax uses too.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.common.cli import UsageError, one_line, process_id

T = TypeVar("T")

# Numbers of processes that launchers tell. JAX reads those of the first two by itself, and TPU pods and Kubernetes.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "PMI_SIZE")
_PODS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "MEGASCALE_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX")
_BEAT, _SILENCE = 2.0, 30.0  # seconds between signs of life, and without one until a process counts as dead
_HOUR = 3_600_000  # in milliseconds; a process may wait for another that opens its data


class SharedError(UsageError):
    """An error that every process raises, and the first prints."""


def join(config: Any, program: str) -> None:
    """Joins the processes that the flags, or else the cluster's environment, name. Call it before JAX has devices.

    Raises:
        UsageError: The flags are incomplete, nothing answers, or the environment is of several processes that JAX can't
            detect.
    """
    flags = {name: getattr(config, name) for name in ("coordinator", "num_processes", "process_id")}
    given = {name: value for name, value in flags.items() if value is not None}
    if distributed.global_state.client is not None or flags == {**flags, "coordinator": None, "num_processes": 1}:
        return
    expected = {name: os.environ[name] for name in _LAUNCHERS if os.environ.get(name, "1") not in ("", "0", "1")}
    pods = {name: os.environ[name] for name in _PODS if os.environ.get(name)}
    expected |= {name: value for name, value in pods.items() if "," in value or (value.isdigit() and int(value))}
    if not given and not expected and not pods:
        return
    if given and len(given) < 3:
        missing = ", ".join("--" + name.replace("_", "-") for name in flags if name not in given)
        raise UsageError(f"several processes need {missing} too (or --num-processes 1 alone: one process, as meant).")
    # Its handler of SIGTERM would replace the one that saves.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(given.pop("coordinator", None), **given)
    except Exception as error:
        if not given and not expected:  # A pod of one, as far as it can tell.
            return
        found = " ".join(f"{name}={value}" for name, value in expected.items()) or "the flags name several processes"
        join = "Join with --coordinator HOST:PORT --num-processes N --process-id I (or start it with srun or mpirun)"
        alone = "if each process is meant to train alone, add --num-processes 1."
        why = f"this process has not joined any: {one_line(error, 150)}"
        raise UsageError(f"{found}, but {why} {join}; {alone}") from error
    _store().key_value_set(_life(process_id()), "0", allow_overwrite=True)
    threading.Thread(target=_watch, args=(program,), daemon=True).start()


def several() -> bool:
    """Whether this training has several processes."""
    return distributed.global_state.num_processes > 1


_round = 0  # of `gather`, the same on all processes


def gather(value: Any) -> list[Any]:
    """The values of all processes, as JSON, in their order. Every process must call it."""
    if not several():
        return [value]
    global _round
    _round += 1
    _store().key_value_set(f"mpjax/{_round}/{process_id()}", json.dumps(value))
    every = range(distributed.global_state.num_processes)
    return [json.loads(_store().blocking_key_value_get(f"mpjax/{_round}/{i}", _HOUR)) for i in every]


def together(function: Callable[[], T]) -> T:
    """Runs a function on every process, which uses no devices. A `UsageError` of one is raised on all."""
    try:
        result = function()
    except UsageError as error:
        raise_first(one_line(error))
        raise
    raise_first(None)
    return result


def raise_first(problem: str | None) -> None:
    """Raises the first problem of all processes on each of them, if there is one."""
    for number, found in enumerate(gather(problem)):
        if found is not None:
            raise SharedError(found if number == 0 else f"process {number}: {found}")


class Agreement:
    """A decision that all processes take at the same step: the largest number that any of them has asked for.

    It needs no wait: each call starts a maximum over all devices and returns that of the call before. A single process
    decides at once.
    """

    def __init__(self) -> None:
        self._started: jax.Array | None = None

    def __call__(self, wanted: int) -> int:
        if not several():
            return wanted
        before, self._started = self._started, _maximum()(wanted)
        return 0 if before is None else int(before)


@functools.cache
def _maximum() -> Callable[[int], jax.Array]:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    sharded, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
    largest, local = jax.jit(jnp.max, out_shardings=whole), len(jax.local_devices())
    return lambda x: largest(jax.make_array_from_process_local_data(sharded, np.full(local, x, np.int32)))


# Ends together: a process that is killed says nothing, and the others would wait for it on the devices for ever.


def _store() -> Any:
    return distributed.global_state.client


def _life(number: int) -> str:
    return f"mpjax/life/{number}"


def _watch(program: str) -> None:
    """Gives signs of life, and ends this process with one line if another has ended without a word."""
    seen: dict[str, tuple[str, float]] = {}
    count = 0
    while True:
        time.sleep(_BEAT)
        count += 1
        store = _store()
        if store is None:  # This process is about to end.
            return
        try:
            if not store.key_value_try_get(_life(process_id())).isdigit():
                return
            store.key_value_set(_life(process_id()), str(count), allow_overwrite=True)
            lives = dict(store.key_value_dir_get("mpjax/life/"))
        except Exception:
            end(program, "process 0, which connects the others,")
        now = time.monotonic()
        for name, life in lives.items():
            if seen.get(name, ("", 0))[0] != life:
                seen[name] = life, now
            if life == "failed" or (life != "done" and now - seen[name][1] > _SILENCE):
                end(program, f"process {name.rpartition('/')[2]}")


def lost_peer(error: BaseException) -> bool:
    """Whether an error of the runtime means that another process has ended."""
    signs = ("UNAVAILABLE", "gloo", "closed by peer", "reset by peer", "DEADLINE", "barrier", "NCCL", "heartbeat")
    return several() and isinstance(error, jax.errors.JaxRuntimeError) and any(sign in str(error) for sign in signs)


_ending = threading.Lock()


def end(program: str, who: str) -> None:
    """Ends this process after another has ended: before JAX's own thread does, which prints a stack."""
    _ending.acquire()  # Only one thread tells, and nothing runs after it.
    print(f"{program}: error: {who} has ended; --resume continues from the last checkpoint.", file=sys.stderr)
    leave_alone(2)


def leave(failed: bool) -> None:
    """Tells the others that this process has ended; after an error that it does not share, at once."""
    if several():
        _store().key_value_set(_life(process_id()), "failed" if failed else "done", allow_overwrite=True)


def leave_alone(code: int) -> None:
    """Ends this process without waiting for the others, as JAX does at the end of Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
