"""The launcher's report says what runs."""

import atexit
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

from mpjax.launcher import cli, hooks, options
from mpjax.launcher.report import Report, _is_half
from mpjax.program.graph import walk
from tests.launcher.programs import ATTENTION, LINEAR


@pytest.mark.parametrize(
    ("dtype", "half"), [("float32", False), ("bfloat16", True), ("float16", True), ("float8_e4m3fn", True)]
)
def test_matmuls_of_float8_count_as_half_or_less(dtype, half):
    x = jnp.ones((16, 16), dtype)
    dot = lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32)
    (site,) = [site for site in walk(jax.make_jaxpr(dot)(x)) if site.eqn.primitive.name == "dot_general"]
    assert _is_half(site) == half


def test_the_summary_names_gradients_that_stay_in_float32(launched, capsys):
    session = launched(quiet=False)
    tx = optax.sgd(0.1)
    w = jnp.ones((16, 16))

    def product(w):
        return jnp.mean((jnp.ones((8, 16)) @ w) ** 2)

    def saddle(w):
        return w[0, 0] * w[1, 1]

    def step(w, _):
        grads = jax.grad(product)(w)
        grads += jax.grad(saddle)(w)
        return tx.update(grads, tx.init(w))[0], None

    jax.lax.scan(step, w, length=2)
    jax.jit(lambda w: w - 0.1 * jax.grad(product)(w))(w)
    Report(session, always=False).summary()
    (line,) = capsys.readouterr().err.splitlines()
    outside, by_hand = line.split("; ")
    assert outside.startswith("mpjax run: nothing was cast to half: the gradients of product at test_report.py:")
    assert ", saddle at test_report.py:" in outside
    assert "ran outside of the script's own jax.jit" in outside
    assert by_hand.startswith("the gradients of product at test_report.py:")
    assert "an update that can skip a step" in by_hand


@pytest.fixture
def report_of(capsys):
    """What `mpjax run` with these arguments prints about a script, which runs in this process."""

    def run(*arguments):
        parsed = cli.parser().parse_args([*map(str, arguments)])
        patches = hooks.patch(cli.options_of(parsed))
        report = Report(patches.session, always=True)
        atexit.unregister(report.last_block)
        patches.session.watchers.append(report.traced)
        try:
            with jax.numpy_dtype_promotion("standard"):  # as users' scripts expect
                runpy.run_path(parsed.script[0])
            report.last_block()
        finally:
            patches.undo()
            jax.clear_caches()
        return capsys.readouterr().err

    return run


def test_rules_of_a_file_apply(script, report_of):
    rules = script('deny = ["tanh"]\n[overrides]\n"*/head" = "float32"\n', "rules.toml")
    named = LINEAR.replace("(x @ w) ** 2", 'jax.named_scope("head")(lambda: x @ w)() ** 2')
    first, last = report_of("--rules", rules, script(named)).split("mpjax run: summary")
    assert "step (script.py:4): 0.0% of" in first
    assert "100.0% not: script.py:6 (head): " in first
    hint = "(--explain FILE lists primitives and module paths)"
    assert f"  matched nothing so far: deny 'tanh' {hint}" in first
    assert f"mpjax run: matched nothing: deny 'tanh' {hint}" in first
    assert last.startswith("\n  step (script.py:4)")
    with pytest.raises(options.LaunchError, match="allowed = 3 is not understood"):
        options.read_rules(script("allowed = 3", "rules.toml"))


def test_fused_attention_is_asked_for_by_a_flag(script, report_of, tmp_path):
    plan = tmp_path / "plan.txt"
    report_of("--policy", "mixed_bfloat16", "--attention", "xla", "--explain", plan, script(ATTENTION))
    assert "fused_attention" in plan.read_text()


def test_a_quiet_report_says_that_half_was_not_used(script, report_of):
    by_hand = """
    import jax, jax.numpy as jnp
    jax.jit(lambda w: w - 0.5 * jax.grad(lambda w: jnp.sum(w @ w))(w))(jnp.eye(4))
    """
    assert report_of("--quiet", script(by_hand)).startswith("mpjax run: in float32: the gradients of <lambda> at")


TRAINER = """
import jax, jax.numpy as jnp
class Trainer:
    def fit(self, w):
        step = jax.jit(lambda w: w - 0.5 * jax.grad(lambda w: jnp.mean((jnp.ones((8, 16)) @ w) ** 2))(w))
        return step(w)
"""


def test_a_trainer_that_is_installed_is_named_with_the_whole_route(script, report_of, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    script(TRAINER, "site-packages/trainer.py")
    monkeypatch.syspath_prepend(folder)
    path = script("import jax.numpy as jnp, trainer\ntrainer.Trainer().fit(jnp.ones((16, 16)))")
    (line,) = report_of(path).splitlines()
    assert line.startswith("mpjax run: nothing was cast to half: gradients that trainer computed.")
    assert line.endswith("the list `packages` of a --rules file, and if it does not update by optax, add --policy "
                         "mixed_bfloat16 --any-gradient")  # fmt: skip
    rules = script('packages = ["trainer"]', "rules.toml")
    assert "100.0% of" in report_of("--policy", "mixed_bfloat16", "--any-gradient", "--rules", rules, path)


def test_calls_in_float32_of_a_function_that_also_trains_are_counted(script, report_of):
    trains = """
    import jax, jax.numpy as jnp, optax
    loss = lambda w: jnp.mean((jnp.ones((8, 16)) @ w) ** 2)
    gradient, tx, w = jax.jit(jax.grad(loss)), optax.sgd(0.1), jnp.eye(16)
    state = tx.init(w)
    for _ in range(4):
        updates, state = tx.update(gradient(w), state)
        w = optax.apply_updates(w, updates)
    for _ in range(5):
        gradient(w * 1.0)
    """
    last = report_of(script(trains)).split("mpjax run: summary")[1].splitlines()
    assert last[1].startswith("  loss (script.py:3): 3 steps") or last[1].startswith(
        "  <lambda> (script.py:3): 3 steps"
    )
    assert last[2] == "    and 6 in float32: the first, and where gradients or parameters met no update"


ROTARY = """
import jax, jax.numpy as jnp, optax
w, x, positions = jnp.eye(16), jnp.ones((8, 16)), 15900 + jnp.arange(8)
tx = optax.sgd(0.1)

@jax.jit
def loss(w, x, positions):
    angles = jnp.einsum("i,j->ij", positions.astype("CAST"), (1e-4 ** (jnp.arange(16) / 16)).astype("CAST"))
    return jnp.mean((x @ w * jnp.cos(angles.astype("float32"))) ** 2)

@jax.jit
def step(w, state, x, positions):
    updates, state = tx.update(jax.grad(loss)(w, x, positions), state)
    return optax.apply_updates(w, updates), state

step(w, tx.init(w), x, positions)
"""


def test_the_first_block_names_a_rounding_that_is_amplified(script, report_of):
    report = report_of(script(ROTARY.replace("CAST", "bfloat16")))
    (line,) = [line for line in report.splitlines() if line.startswith("  risk: ")]
    assert "at script.py:9 reads whole numbers beyond 256, rounded to bfloat16 by " in line
    assert "at script.py:8" in line
    assert "risk" not in report_of(script(ROTARY.replace("CAST", "float32")))


def test_an_earlier_import_of_jax_is_refused(script, capsys, monkeypatch):
    for name in (options.POLICY, options.DETAILS):
        monkeypatch.setenv(name, "")
    assert cli.main([str(script(LINEAR))]) == 2
    assert "JAX is imported already" in capsys.readouterr().err
