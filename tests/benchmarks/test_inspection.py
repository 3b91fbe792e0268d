"""The table of the inspections' costs."""

from benchmarks import inspection


def test_the_table_has_each_time_and_the_cost_of_watch():
    steps = {"no watch": {"milliseconds": 100.0, "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}}
    results = {
        "times": {"a model": {"numerics": {"seconds": 26.4, "ratio": 2.62, "to": "gradient"}}},
        "watch": {"steps": steps, "cost at every=100": 0.0123},
    }
    found = inspection.table(results)
    assert "| a model | numerics | 26.4 | 2.62 | the gradient |" in found
    assert "1.2% of a step" in found


def test_runs_of_a_profiled_step_are_counted():
    class Step:
        lower = None

        def __call__(self, x):
            return x + 1

    step = inspection.CountedStep(Step())
    assert step(1) == 2
    assert step(2) == 3
    assert step.runs == 2
