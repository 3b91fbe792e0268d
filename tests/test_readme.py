"""The README's example runs as it stands, and its commands are the ones CI runs."""

import contextlib
import io
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs_as_it_stands_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    loss = float(re.search(r"loss ([\d.]+),", output.getvalue()).group(1))
    assert loss < 0.1, "predicting the mean gives 0.5"


def test_names_the_two_commands():
    assert 'pip install -e ".[examples]" && python -m examples.imagenet' in README
    assert 'pip install -e ".[test]" && pytest' in README
    assert 'pip install -e ".[test]" && pytest' in (ROOT / ".ci" / "run").read_text()
