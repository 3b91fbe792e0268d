"""The launcher in IPython. IPython is not installed for the tests: a shell with the parts that the launcher uses."""

import sys
import types

import pytest

from mpjax.launcher import hooks


class Shell:
    def __init__(self):
        self.callbacks, self.shown = [], None
        self.events = types.SimpleNamespace(register=lambda event, call: self.callbacks.append((event, call)))

    def set_custom_exc(self, kinds, handler):
        self.kinds, self.handler = kinds, handler

    def showtraceback(self, exception, tb_offset=None):
        self.shown = exception


@pytest.fixture
def shell(monkeypatch):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_a_cell_ends_with_the_summary_and_errors_show_no_frame_of_mpjax(shell, monkeypatch):
    calls = []
    hooks.attach(lambda: calls.append(None))
    ((event, callback),) = shell.callbacks
    callback("the result of a cell")
    assert (event, len(calls)) == ("post_run_cell", 1)
    monkeypatch.setattr(hooks, "_is_ours", lambda entry: entry.tb_frame.f_code.co_name == "launcher")

    def launcher(call):
        call()

    def fails():
        raise ValueError("of the script")

    try:
        launcher(fails)
    except ValueError as error:
        shell.handler(shell, ValueError, error, error.__traceback__)
    kind, _, trace = shell.shown
    assert issubclass(kind, shell.kinds)
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == ["test_a_cell_ends_with_the_summary_and_errors_show_no_frame_of_mpjax", "fails"]


def test_nothing_happens_outside_of_ipython(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    hooks.attach(None)
