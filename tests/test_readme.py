"""The README's example runs as it stands and with its diff applied, and its commands are the ones CI runs."""

import contextlib
import io
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(code):
    """What a program prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    return float(re.search(r"loss ([\d.]+)", output.getvalue()).group(1))


def test_the_example_learns_before_and_after_its_two_changed_lines():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    removed, added = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
    assert len(removed) == len(added) == 2
    changed = code
    for before, after in zip(removed, added, strict=True):
        assert changed.count(f"{before}\n") == 1
        changed = changed.replace(f"{before}\n", f"{after}\n")
    losses = [run(code), run(changed + "assert 'f16[' in str(jax.make_jaxpr(train_step)(params, opt_state))\n")]
    assert max(losses) < 0.1, "predicting the mean gives 0.5"


def test_the_first_page_is_short():
    assert len(README.split()) <= 900


def test_names_the_two_commands():
    assert 'pip install -e ".[examples]" && python -m examples.imagenet' in README
    assert 'pip install -e ".[test]" && pytest' in README
    assert 'pip install -e ".[test]" && pytest' in (ROOT / ".ci" / "run").read_text()
