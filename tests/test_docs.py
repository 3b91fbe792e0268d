"""The outputs in the documentation are those of the current program."""

from __future__ import annotations

import ast
import re
import shlex

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import mpjax
from docs import hooks
from docs.make import FOLDER, MEASURED, NOT_RUN, PAGES, blocks, made, table
from mpjax.inspection import cli
from mpjax.inspection.tools import TOOLS

# Pages whose rows come in another order before JAX 0.12, or name what is kept by another operation (tanh's derivative
# has the primitive `one_minus_square` there, and a `sub` before), or that print what an older XLA plans otherwise.
OF_NEWEST = {"distributed.md", "inspection/audit.md", "inspection/plan.md", "troubleshooting/not_faster.md"}


def text_of(page):
    """A page without its numbers and the widths of its columns: these differ between versions of JAX."""
    return re.sub(r"─+", "─", re.sub(r"[ …]+", " ", re.sub(r"\d[\d.,]*( [kMGT]?(FLOP|B)\b)?", "#", page)))


def numbers_of(page):
    """The numbers of a page, without those of library lines and inside words."""
    found = re.findall(r"(?<![\w.:])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", page)
    return [float(number.replace(",", "")) for number in found]


@pytest.mark.standard_promotion  # as readers have it
@pytest.mark.parametrize("name", PAGES)
def test_outputs_match_the_program(name):
    if name in OF_NEWEST and jax.__version_info__ < (0, 12):
        pytest.skip("an older JAX orders or names the rows of this page otherwise")
    page = (FOLDER / name).read_text()
    now = made(page, measured=False, folder=(FOLDER / name).parent)
    assert text_of(now) == text_of(page), f"run: python -m docs.make {name}"
    if jax.__version_info__ >= (0, 12):  # the pages are of the newest version
        assert numbers_of(page) == pytest.approx(numbers_of(now), rel=0.05), f"run: python -m docs.make {name}"


def test_measured_outputs_are_kept_unless_requested():
    page = f"{MEASURED}\n```python\nprint(1)\n```\n\n{MEASURED}\n```text\n2\n```\n"
    assert made(page, measured=False) == page
    assert made(page).endswith("```text\n1\n```\n")
    command = "```console\n$ python -c 'print(1 + 1)'\n"
    assert made(f"{MEASURED}\n{command}```\n").endswith(f"{command}2\n```\n")


def test_every_output_block_of_a_page_is_filled():
    for name in PAGES:
        for block in blocks((FOLDER / name).read_text()):
            assert block.text.strip(), (name, block)
            assert len(block.text.splitlines()) > 1 or block.language != "console", (name, block)


def test_all_code_of_a_page_is_tested():
    for path in FOLDER.rglob("*.md"):
        fences = re.findall(r"^([ \t]*)```(\w*)\n.*?^[ \t]*```$", path.read_text(), re.DOTALL | re.MULTILINE)
        assert {language for _, language in fences} <= {"python", "console", "text", "sh", "toml", "diff"}, path
        assert not [indent for indent, _ in fences if indent], f"{path}: an indented block is not run"
        code = [
            line for block in blocks(path.read_text()) if block.language == "python" for line in block.text.splitlines()
        ]
        assert not [line for line in code if len(line) > 80], f"{path}: ruff format --line-length 80 {path}"


@pytest.mark.parametrize("name", PAGES)
def test_imports_of_measured_blocks_exist(name, monkeypatch):
    monkeypatch.syspath_prepend((FOLDER / name).parent)
    for block in blocks((FOLDER / name).read_text()):
        if block.language == "python" and block.mark == MEASURED:
            imports = [node for node in ast.parse(block.text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            exec(compile(ast.Module(imports, []), name, "exec"), {})


# Sentences that were false once, each with what it claims.


def page(name):
    return (FOLDER / name).read_text()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.BatchNorm(True)(nn.Dense(8, name="mlp")(x)))
        return nn.Dense(4, name="head")(x)


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.mlp, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.mlp(x)))


class Equinox(eqx.Module):
    mlp: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    __call__ = NNX.__call__


class Haiku(hk.Module):
    def __call__(self, x):
        return hk.Linear(4, name="head")(hk.LayerNorm(-1, True, True)(hk.Linear(8, name="mlp")(x)))


def libraries():
    """A model of each library as a function of its parameters, and these."""
    key, x = jax.random.key(0), jnp.ones((2, 8))
    linen, haiku = Linen(), hk.without_apply_rng(hk.transform(lambda x: Haiku("net")(x)))
    layers = eqx.nn.Linear(8, 8, key=key), eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 4, key=key)
    return {
        "linen": (lambda variables: linen.apply(variables, x), jax.jit(linen.init)(key, x)),
        "nnx": (lambda model: model(x), NNX(nnx.Rngs(0))),
        "haiku": (lambda params: haiku.apply(params, x), jax.jit(haiku.init)(key, x)),
        "equinox": (lambda model: jax.vmap(model)(x), Equinox(*layers)),
    }


def patterns():
    """The patterns over module paths that pages and docstrings show, without those in outputs."""
    pages = [re.sub(r"^```(text|console).*?^```$", "", p.read_text(), flags=re.S | re.M) for p in FOLDER.rglob("*.md")]
    docstrings = [getattr(mpjax, name).__doc__ or "" for name in hooks.public_names()]
    return {x for text in (*pages, *docstrings) for x in re.findall(r'(?<=[;"])(\*/[^\s/"]+|[^\s;"`]+(?==>))', text)}


@pytest.mark.standard_promotion
def test_patterns_of_pages_match_in_the_libraries():
    shown = {pattern.partition("=>")[0] for pattern in patterns()}
    # Linen's automatic names; the page's own mistake; a state of an optimizer.
    assert shown == {"*/head", "*/mlp", "head", "<norm>"} | {"*/LayerNorm_*", "*/BatchNorm_*"} | {"haed"} | {"*/nu"}
    models = libraries()
    for library, (fun, params) in models.items():
        tree = nnx.state(params, nnx.Param) if library == "nnx" else params
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for pattern in ("*/head", "*/mlp", "<norm>", *(["*/LayerNorm_*", "*/BatchNorm_*"] * (library == "linen"))):
            name = pattern.strip("*/<>")
            # A pattern that matches nothing is a warning, an error here.
            cast = mpjax.get_policy(f"p=bf16,c=bf16,o=f32;{pattern}=>float32").cast_to_param(tree)
            kept = [leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cast)]
            assert kept == [name.lower() in path.lower() for path in paths], (library, pattern)
            if pattern != "<norm>":
                rules = mpjax.Rules(deny=[pattern])
                rows = mpjax.explain(mpjax.autocast(fun, "mixed_bfloat16", rules=rules), params).rows
                own = {dtype for row in rows if name in row.module for dtype in row.dtypes_out}
                assert own == {"float32"}, (library, pattern)
    for model, arguments in ((Linen(), (models["linen"][1],)), (models["nnx"][1], ())):
        model = mpjax.with_policy(model, "mixed_bfloat16;head=>float32")
        apply = getattr(model, "apply", model)
        assert mpjax.audit(apply, *arguments, jnp.ones((2, 8))).flops == {"bfloat16": 256, "float32": 128}


@pytest.mark.standard_promotion
def test_each_row_of_the_table_of_checkpoints_trains_on():
    text, names = page("guides/checkpoints.md"), {}
    for block in blocks(text):
        if block.language == "python":
            exec(compile(block.text, "checkpoints.md", "exec"), names)
    params, plain, dynamic, half = (names[name] for name in ("params", "plain", "tx", "half_tx"))
    static = mpjax.static_loss_scale(plain, 2.0**10)
    saved = {"before": names["plain_state"], "static": static.init(params), "dynamic": dynamic.init(params)}
    goes_on = {
        "any precision with float32 parameters": [
            (dynamic, saved["dynamic"], policy) for policy in ("float32", "mixed_bfloat16", "mixed_float16")
        ],
        "a float32 run without loss scaling": [(dynamic, names["opt_state"], "mixed_float16")],
        "Flax's `DynamicScale`, jmp's `DynamicLossScale`": [
            (dynamic, dynamic.init(params)._replace(inner_state=saved["before"], loss_scale=scale), "mixed_float16")
            for scale in (DynamicScale().scale, jmp.DynamicLossScale(jnp.float32(2**15)).loss_scale)
        ],
        "`static_loss_scale`": [(dynamic, saved["static"], "mixed_float16"), (static, saved["dynamic"], "O1")],
        "float32 parameters": [(half, half.init(params), "O2")],
    }
    assert [row[0] for row in table(text, "| checkpoint of")] == [*goes_on]
    exact = float(names["loss_fn"](params))
    for tx, state, policy in (run for runs in goes_on.values() for run in runs):
        trained = mpjax.get_policy(policy).cast_to_param(params)

        @jax.jit
        def step(params, state, tx=tx, policy=policy):
            loss, grads = mpjax.value_and_grad(names["loss_fn"], state, policy=policy)(params)
            return *mpjax.apply_gradients(tx, grads, state, params), loss

        new, after, loss = step(trained, state)
        assert float(loss) == pytest.approx(exact, rel=0.01)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, tx.init(params)), policy
        assert after.skipped_steps == state.skipped_steps
        assert not (new["up"] == trained["up"]).all()


def test_commands_of_inspections_are_understood():
    tools = "|".join(tool.name for tool in TOOLS)
    pages = [path.read_text() for path in (*FOLDER.rglob("*.md"), FOLDER.parent / "README.md")]
    found = {c for text in pages for c in re.findall(rf"python -m mpjax ((?:{tools}) [\w./]+:.*?)(?: 2>|[`|\n])", text)}
    assert len(found) >= 15
    for command in found:
        cli._parser().parse_args(shlex.split(command))  # exits if it is not


def test_commands_for_scripts_without_an_optimizer_of_optax_cast_their_gradients():
    commands = re.findall(r"python -m mpjax run [^`]*keras[^`]*", page("quickstart/keras.md"))
    assert commands
    assert all("--any-gradient" in command and "mixed_bfloat16" in command for command in commands)


def test_the_calls_of_torch_are_those_of_its_current_interface():
    calls = re.findall(r"torch\.amp\.(?:custom_fwd|custom_bwd|autocast)\(([^)]*)\)", page("coming_from/torch.md"))
    assert calls
    assert all("device_type" in call for call in calls)


def test_every_block_runs():
    # The code for an exported file runs on an export, in tests/examples/imagenet/test_checkpoints.py.
    assert {path.name for path in FOLDER.rglob("*.md") if NOT_RUN in path.read_text()} == {"training_scripts.md"}
