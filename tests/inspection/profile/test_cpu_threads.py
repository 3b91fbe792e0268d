"""Kernels of a CPU's trace: the time that its threads worked, not the time until a callback ran."""

import pytest

from mpjax.inspection.profile.profile import Recording, Timing, report_of
from mpjax.inspection.profile.profiler_trace import read
from tests.inspection.profile.gpu_traces import Span, profile_data

HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %copy.29 = f32[8,8]{1,0} copy(%x), metadata={op_name="jit(step)/Net/a/copy"}
  ROOT %dot.1 = f32[8,8]{1,0} dot(%x, %copy.29), lhs_contracting_dims={1}, metadata={op_name="jit(step)/Net/b/dot"}
}
"""


def thunk(name, start, end, number, run=2):
    stats = {"hlo_op": name, "hlo_module": "jit_step", "run_id": str(run), "_p": number}
    return Span(name, start, end, stats)


def at(name, time, **stats):
    return Span(name, time, time, stats)


def report(*threads):
    first = Span("copy.29", 0, 1, {"hlo_op": "copy.29", "hlo_module": "jit_step", "run_id": "1", "_p": "first"})
    lines = {f"thread {i}": thread for i, thread in enumerate(([first], *threads))}
    marks = [Span("mpjax.dispatch", 0, 2), Span("mpjax.wait", 2, 30000)]
    trace = read(profile_data({"/host:CPU": {"python": marks, **lines}}))
    recording = Recording(trace, HLO, 1)
    return report_of(recording, recording, Timing(0.024, 0.024, 1.0), device="cpu", cores=2)


# The copy takes 60 µs here and 50 µs in a task on the other thread. That goes on with the matmul, which takes 20 ms,
# and only then calls back that the copy has ended.
CALLER = [
    Span("ThunkExecutor::Execute", 10, 80),
    thunk("copy.29", 10, 70, "1"),
    at("ThreadpoolListener::Record", 12, _p="100"),
]
WORKER = [
    at("ThreadpoolListener::StartRegion", 40, _c="100"),
    Span("ThunkExecutor::Execute", 90, 20100),
    thunk("dot.1", 95, 20095, "2"),
    at("end: dot.1", 20095, _c="2"),
    at("end: copy.29", 20105, _c="1"),
    at("ThreadpoolListener::StopRegion", 20110),
]


def test_an_asynchronous_kernel_takes_what_its_tasks_took():
    times = {kernel.name: kernel.seconds for kernel in report(CALLER, WORKER).kernels}
    # From 10 to 90 µs, and what the task does after the matmul.
    assert times == {"dot.1": pytest.approx(20e-3), "copy.29": pytest.approx(90e-6)}


def test_times_of_kernels_add_up_to_the_devices():
    found = report(CALLER, WORKER)
    assert found.fits
    assert found.kernel_seconds == pytest.approx(found.split.device, rel=1e-3)
    assert found.limit != "memory traffic"


def test_times_that_cannot_be_are_not_ranked():
    # Nothing tells who worked for the copies until they ended; four at a time do not fit on two cores.
    threads = [[thunk("copy.29", 10, 20, str(i)), at("end: copy.29", 24000, _c=str(i))] for i in range(4)]
    found = report(*threads)
    assert not found.fits
    text = " ".join(str(found).split())
    assert "96 ms of kernels in 24 ms on 2 cores" in text
    assert "not ranked" in text
    assert "by module" not in text
    assert found.limit == ""
