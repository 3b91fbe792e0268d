"""`python -m mpjax run` and `MPJAX_AUTOCAST_ALL`, in their own processes."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
import venv

import pytest

from tests.launcher.programs import ATTENTION, LINEAR

ROOT = pathlib.Path(__file__).parent.parent.parent
TRAIN = ROOT / "tests" / "launcher" / "scripts" / "scanned_steps.py"

NAMED = LINEAR.replace("(x @ w) ** 2", 'jax.named_scope("head")(lambda: x @ w)() ** 2')
HINT = "(--explain FILE lists primitives and module paths)"


def python(*arguments, interpreter=sys.executable, cwd=None, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MPJAX")}
    return subprocess.run(
        [interpreter, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def run(*arguments, **options):
    return python("-m", "mpjax", "run", *arguments, **options)


def test_a_script_runs_in_half_and_prints_a_summary(script, tmp_path):
    queries = "import importlib.util\nfor name in ('jax', 'optax'):\n    importlib.util.find_spec(name)\n"
    done = run("--explain", tmp_path / "plan.txt", script(queries + LINEAR), "--lr", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss 0.410 --lr -m\n"
    first, last = done.stderr.split("mpjax run: summary")
    assert "mpjax run: mixed_float16, loss scale 32768 at first, dynamic" in first
    assert "): 100.0% of" in first, "a query for a module keeps the hook"
    assert "differentiates: <lambda> at script.py:9" in first
    assert "step (script.py:7): 3 steps" in last
    assert "0 skipped, 0 repeated" in last
    assert "dot_general" in (tmp_path / "plan.txt").read_text()


def test_a_module_runs_with_its_arguments_quietly_and_loads_only_what_training_needs(script, tmp_path):
    """`benchmarks.launcher` measures scripts of others again if the code that is loaded changes, and no other."""
    optax_first = LINEAR.replace("import sys, ", "import optax, sys, ")
    loaded = "\nprint(*(m.removeprefix('mpjax.') for m in sys.modules if m.startswith('mpjax.')), step._cache_size())"
    script(optax_first + "print(__name__, __spec__.name, sys.argv[0])" + loaded, "my_trainer.py")
    flags = ["--policy", "mixed_bfloat16", "--quiet", "--deny", "*/haed"]
    done = run(*flags, "-m", "my_trainer", "--epochs", "2", cwd=tmp_path)
    # A typo is reported even with --quiet.
    assert (done.returncode, done.stderr) == (0, f"mpjax run: matched nothing: deny '*/haed' {HINT}\n")
    first, second, third = done.stdout.splitlines()
    assert float(first.split()[1]) == pytest.approx(0.41, rel=2**-8)  # bfloat16's rounding
    assert first.endswith(" --epochs 2")
    assert second == f"__main__ my_trainer {tmp_path / 'my_trainer.py'}"
    *modules, compiled = third.split()
    parts = {name.partition(".")[0] for name in modules if name not in ("inspection", "inspection.tools")}
    assert parts == {"_lazy", "casting", "kernels", "launcher", "loss_scale", "policy", "program"}
    assert compiled == "1", "compiles once"


def test_a_dry_run_prints_the_audit_under_the_rules_and_trains_nothing(script):
    done = run("--dry-run", "--deny", "*/head", script(NAMED))
    assert done.returncode == 0, done.stderr
    assert "0.0% in half" in done.stdout
    assert "100.0% in half" not in done.stdout
    assert "loss" not in done.stdout.replace("loss scale", "")
    assert ".py:" in done.stdout.splitlines()[0], "the step's name"
    assert "does not know" not in done.stdout


REFUSED = {
    "no script": (["missing.py"], "no such script: missing.py"),
    "no module": (["-m", "missing.module"], "no such module: missing.module"),
    "nothing": ([], "name a script, or a module after -m"),
    "no rules": (["--rules", "missing.toml", str(TRAIN)], "--rules missing.toml"),
    "no primitive": (["--deny", "tanhh", str(TRAIN)], "did you mean 'tanh'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_in_the_call_is_one_line_and_code_2(case):
    arguments, message = REFUSED[case]
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("python -m mpjax run: error: ")


def test_a_script_without_gradients_is_reported(script):
    done = run(script("import jax, jax.numpy as jnp\nprint(jax.jit(lambda x: x @ x)(jnp.eye(4))[0, 0])"))
    assert (done.returncode, done.stdout) == (0, "1.0\n")
    assert "nothing was cast to half: the script differentiated nothing" in done.stderr
    assert "nothing was cast to half" in run(script("print('no JAX at all')")).stderr


def test_a_script_that_updates_by_hand_is_left_alone_and_told_why(script):
    by_hand = (
        "import jax, jax.numpy as jnp, optax\noptax.sgd(0.1)\n"
        "step = jax.jit(lambda w: w - 0.5 * jax.grad(lambda w: jnp.sum(w @ w))(w))\nprint(step(jnp.eye(4))[0, 0])\n"
    )
    done = run("--policy", "mixed_bfloat16", script(by_hand))
    assert (done.returncode, done.stdout) == (0, "0.0\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpjax run: nothing was cast to half: the gradients of <lambda> at script.py:3 do not go")
    assert line.endswith("(--policy mixed_bfloat16 --any-gradient casts them all the same)")


def test_a_script_that_fails_before_it_trains_is_given_no_advice(script):
    for text in ("import no_such_module", "import jax, no_such_module"):
        done = run(script(text))
        assert done.returncode == 1
        assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


def test_modules_that_are_imported_again_are_patched_again(script):
    again = "import importlib, jax, optax\nfor module in (optax, jax, optax, jax):\n    importlib.reload(module)\n"
    done = run(script(again + LINEAR))
    assert done.stdout == "loss 0.410\n", done.stderr
    assert "): 100.0% of" in done.stderr
    assert "nothing was cast" not in done.stderr
    assert done.stderr.count("mpjax run:") == 2  # the first block and the summary


def test_an_import_past_the_hook_is_an_error_at_exit(script):
    past = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'AfterImport']\n"
    done = run(script(past + "import jax"))
    assert "mpjax run: error: nothing was cast to half: JAX was imported, but not through" in done.stderr


def test_the_script_sees_what_it_sees_without_the_launcher(script, tmp_path):
    text = """
    import atexit, os, pickle, sys
    class Thing: pass
    atexit.register(print, "atexit")
    print(__name__, __file__, type(__builtins__), sys.argv, sys.path[0], os.getcwd())
    print("jax" in sys.modules, "main" in globals(), type(__loader__).__name__, __spec__)
    print(pickle.loads(pickle.dumps(Thing())).__class__.__module__, sys.modules["__main__"].Thing is Thing)
    def fails():
        raise ValueError("of the script")
    {end}
    """
    for end in ("sys.exit(7)", "fails()", "os.kill(os.getpid(), 15)", "sys.exit('a text')", "raise KeyboardInterrupt"):
        path = script(text.format(end=end))
        launched, without = run(path.name, "a", cwd=tmp_path), python(path.name, "a", cwd=tmp_path)
        assert launched.stdout == without.stdout
        assert launched.returncode == without.returncode
        summary = "mpjax run: nothing was cast to half"
        stderr = [line for line in launched.stderr.splitlines() if not line.startswith(summary)]
        assert stderr == without.stderr.splitlines()


def test_a_signal_reaches_the_script(script):
    path = script("""
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: (print("got it", flush=True), exit(5)))
    print("ready", flush=True); time.sleep(60)
    """)
    command = [sys.executable, "-m", "mpjax", "run", "--quiet", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "got it\n"
    assert process.returncode == 5


def test_ctrl_c_interrupts_the_script(script):
    path = script("""
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("saved", flush=True)
    """)
    command = [sys.executable, "-m", "mpjax", "run", "--quiet", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "saved\n")
    assert err.endswith("KeyboardInterrupt\n")
    assert "mpjax" not in err


def test_the_traceback_of_an_error_is_that_of_a_plain_run(script):
    failing = textwrap.indent(LINEAR.replace("jnp.mean((x @ w) ** 2)", "jnp.mean(x @ w @ x)"), " ")
    path = script(f"try:{failing}except Exception as e:\n e.__cause__ = e\n raise ExceptionGroup('both', [e]) from e")
    launched, without = run("--quiet", path), python(path)
    assert (launched.returncode, launched.stderr) == (without.returncode, without.stderr)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An interpreter with the wheel's .pth file, the packages of this one, and the repository."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "a_paths.pth").write_text("\n".join([*packages, str(ROOT)]))
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = included["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in included.items():
        (site / target).write_text((ROOT / source).read_text())
    return str(folder / "bin" / "python")


# The command of the README and of the home page runs in tests/test_readme.py.
RUN_ON_FIRST_SCREEN = "python -m mpjax run train.py"
SHOWN = {
    command.strip()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    for command in re.findall(
        r"(?:MPJAX_AUTOCAST_ALL=\S+ python|python -m mpjax run) \w*[-.][^`#\n]*", page.read_text()
    )
    if page.parent.name != "reference"
} - {RUN_ON_FIRST_SCREEN}


def test_the_commands_of_pages_run(environment, script, tmp_path):
    """Those of the documentation, as a shell runs them, in a folder that has the files that they name."""
    (tmp_path / "my").mkdir()
    for name in ("train.py", "script.py", "my/trainer.py"):
        script(ATTENTION if name == "script.py" else LINEAR, name)
    script('packages = ["keras"]', "keras.toml")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MPJAX", "PYTHONPATH"))}
    path = os.pathsep.join((str(pathlib.Path(environment).parent), os.environ["PATH"]))
    assert len(SHOWN) == 5
    for command in SHOWN:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=inherited | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stderr)
        assert "): 100.0% of" in done.stderr, (command, done.stderr)
        policy = "mixed_bfloat16" if "mixed_bfloat16" in command else "mixed_float16"
        assert f"mpjax run: {policy}" in done.stderr
        assert "--epochs" not in command or done.stdout.endswith("--epochs 10\n")


def test_an_unknown_policy_in_the_variable_is_an_error(environment, script):
    bad = python(script(LINEAR), interpreter=environment, PYTHONPATH="", MPJAX_AUTOCAST_ALL="mixed_float15")
    assert bad.returncode == 2
    assert "'mixed_float15'" in bad.stderr


def test_child_processes_run_in_the_policy(environment, script):
    path = script("""
    import multiprocessing
    def child():
        import jax, jax.numpy as jnp, optax
        tx = optax.sgd(0.1)
        step = jax.jit(lambda w, s: tx.update(jax.grad(lambda w: jnp.sum(w @ w))(w), s))
        return "f16[" in str(jax.make_jaxpr(step)(jnp.eye(4), tx.init(jnp.eye(4))))
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(child))
    """)
    done = python("-m", "mpjax", "run", "--quiet", path, interpreter=environment, PYTHONPATH="")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_without_the_variable_nothing_of_mpjax_is_imported(environment):
    code = "import sys; print([m for m in sys.modules if m.startswith('mpjax')])"
    assert python("-c", code, interpreter=environment, PYTHONPATH="").stdout == "[]\n"
    variables = {"MPJAX_AUTOCAST_ALL": "mixed_float16", "MPJAX_AUTOCAST_ALL_OPTIONS": json.dumps({"nonsense": 1})}
    done = python("-c", code, interpreter=environment, PYTHONPATH="", **variables)
    assert done.returncode == 2
    assert "MPJAX_AUTOCAST_ALL_OPTIONS=" in done.stderr
    assert "Traceback" not in done.stderr
