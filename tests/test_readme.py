"""The README's example runs as it stands, under the launcher and with its diff applied; its numbers are results."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import pytest

import mpjax
from benchmarks.training.configurations import CONFIGURATIONS, Configuration, training
from docs.make import made
from testing.models.published import WORKLOADS

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(code):
    """What a program prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    return float(re.search(r"loss ([\d.]+)", output.getvalue()).group(1))


(CODE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_learns_before_and_after_its_changes():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 15
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    changed = CODE
    for hunk in diff.split("\n\n"):
        before, after = ("".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[0] in (" ", s)) for s in "-+")
        assert changed.count(before) == 1
        changed = changed.replace(before, after)
    losses = [run(CODE), run(changed + "assert 'f16[' in str(jax.make_jaxpr(train_step)(params, opt_state))\n")]
    assert max(losses) < 0.1, "predicting the mean gives 0.5"


def test_the_first_screen_quotes_what_the_program_prints(tmp_path):
    (tmp_path / "train.py").write_text(CODE)
    now = made(README, folder=tmp_path)
    without_numbers = [re.sub(r"[\d.]+", "#", page) for page in (README, now)]
    assert without_numbers[0] == without_numbers[1]
    error = "".join(re.findall(r"^    ((?:inf|  overflow).*\n)", README, re.MULTILINE))
    assert error.count("\n") == 2
    assert error in (ROOT / "docs/inspection/find_nonfinite.md").read_text()  # whose outputs are checked


FORMS = {
    "tf32": CONFIGURATIONS["tf32"],
    "autocast_bfloat16": CONFIGURATIONS["autocast_bfloat16"],
    # As with cuDNN's kernel, which no CPU has.
    "autocast_bfloat16_fused": Configuration("autocast", "mixed_bfloat16", rules=mpjax.Rules(attention="xla")),
}


@pytest.fixture(scope="module")
def shares():
    """The share of matmul FLOPs in half of a training step of one of GPT-2 medium's layers, by form."""
    workload = dataclasses.replace(WORKLOADS["gpt2_medium"], layers=1)
    steps = {name: training(workload, form) for name, form in FORMS.items()}
    return {name: mpjax.audit(each.step, *each.abstract()).half_share for name, each in steps.items()}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_table_quotes_the_results(page, shares):
    results = json.loads((ROOT / "benchmarks/results/training_gpu.json").read_text())["results"]["gpt2_medium"]
    for cell, share in shares.items():
        row = results[cell]
        text = f"| {share:.0%} | {row['milliseconds']:.1f} ms | {row['peak_bytes'] / 1e9:.1f} GB |"
        assert text in (ROOT / page).read_text()


def test_the_first_page_is_short():
    assert len(README.split()) <= 900


def test_names_the_two_commands():
    assert 'pip install -e ".[examples]" && python -m examples.imagenet' in README
    assert 'pip install -e ".[test]" && pytest' in README
    assert 'pip install -e ".[test]" && pytest' in (ROOT / ".ci" / "run").read_text()
