"""Runs the scripts of a table in float32 and under the launcher, and compares what they print."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.foreign_scripts.data import corpus, mnist_of_jax_examples
from benchmarks.foreign_scripts.hlo import half_share

ROOT = pathlib.Path(__file__).parent.parent.parent
STAND_INS = pathlib.Path(__file__).parent / "stand_ins"
SEEDS = (0, 1, 2)
SECONDS = 1200
_ANY = r"(-?\d+\.\d+(?:e[+-]?\d+)?)"


@dataclasses.dataclass(frozen=True)
class Script:
    """A script or a notebook of a repository.

    Args:
        path: The file in the folder of repositories.
        result: A pattern whose last match in the output holds the number to compare.
        sizes: Numbers of the script that set its length or seed, and what replaces them: `("steps=200", "steps=20")`.
            `SEED` stands for the seed of the run. Nothing else of a script changes.
        args: Its arguments. `HERE` stands for a folder that holds `corpus.txt`.
        bfloat16: Whether it runs in bfloat16 too.
    """

    path: str
    result: str = _ANY
    sizes: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()
    bfloat16: bool = False


TOYS, NOTEBOOKS = "flax/examples/nnx_toy_examples", "optax/examples"
EQUINOX, DIFFRAX = "equinox/docs/examples", "diffrax/docs/examples"
_ACCURACY, _LOSS = r"Test set accuracy (\S+)", r"[lL]oss(?:: | ?= ?)([^\s,]+)"
_EPOCHS = ("num_epochs = 10\n", "num_epochs = 3\n")
_TOTAL = (("total_steps = 10_000", "total_steps = 1_001"),)
_SEED = ("seed=5678", "seed=SEED")
_PPO = (("5e5", "8192"), ("PRNGKey(30)", "PRNGKey(SEED)"))
SCRIPTS = {
    "JAX mnist_classifier": Script("jax/examples/mnist_classifier.py", _ACCURACY, (_EPOCHS,), bfloat16=True),
    "JAX mnist_vae": Script(
        "jax/examples/mnist_vae.py", r"(?m)^ *\d+ (-\S+) \(", (("num_epochs = 100", "num_epochs = 4"),), bfloat16=True
    ),
    "JAX mnist_classifier_fromscratch": Script("jax/examples/mnist_classifier_fromscratch.py", _ACCURACY, (_EPOCHS,)),
    "JAX spmd_mnist_classifier_fromscratch": Script(
        "jax/examples/spmd_mnist_classifier_fromscratch.py", _ACCURACY, (_EPOCHS,)
    ),
    "Flax 01_functional_api": Script(f"{TOYS}/01_functional_api.py", _LOSS, _TOTAL),
    "Flax 02_lifted_transforms": Script(f"{TOYS}/02_lifted_transforms.py", _LOSS, _TOTAL, bfloat16=True),
    "Flax 03_train_state": Script(f"{TOYS}/03_train_state.py", _LOSS, _TOTAL),
    "Flax 04_data_parallel_with_jit": Script(
        f"{TOYS}/04_data_parallel_with_jit.py", _LOSS, (("dataset(1000, 16)", "dataset(401, 16)"),)
    ),
    "Flax 07_array_leaves": Script(f"{TOYS}/07_array_leaves.py", _LOSS, _TOTAL, bfloat16=True),
    "Flax 10_fsdp_and_optimizer": Script(
        f"{TOYS}/10_fsdp_and_optimizer.py", _LOSS, (("num_steps=10_000", "num_steps=1_001"),)
    ),
    "Haiku mnist": Script(
        "dm-haiku/examples/mnist.py",
        r"'test', 'accuracy': '(\S+)'",
        (("range(3001)", "range(101)"), ("batch_size=1_000)", "batch_size=100)")),
        bfloat16=True,
    ),
    "Haiku vae": Script(
        "dm-haiku/examples/vae.py",
        r"'elbo': ([^}]+)",
        (("training_steps: int = 5000", "training_steps: int = 41"), ("every: int = 100", "every: int = 20")),
        ("--verbosity=0",),
        bfloat16=True,
    ),
    "Haiku transformer": Script(
        "dm-haiku/examples/transformer/train.py",
        r"'loss': ([^,}]+)",
        (("10**6", "41"), ("LOG_EVERY = 50", "LOG_EVERY = 20"), ("NUM_LAYERS = 6", "NUM_LAYERS = 2")),
        ("--verbosity=0", "--dataset_path=HERE/corpus.txt"),
        bfloat16=True,
    ),
    "optax flax_example": Script(f"{NOTEBOOKS}/flax_example.ipynb"),
    "optax freezing_parameters": Script(f"{NOTEBOOKS}/freezing_parameters.ipynb"),
    "optax gradient_accumulation": Script(f"{NOTEBOOKS}/gradient_accumulation.ipynb"),
    "optax lbfgs": Script(f"{NOTEBOOKS}/lbfgs.ipynb"),
    "optax meta_learning": Script(f"{NOTEBOOKS}/meta_learning.ipynb", sizes=(("range(2000)", "range(50)"),)),
    "optax sam": Script(f"{NOTEBOOKS}/contrib/sam.ipynb", sizes=(("T = 8000", "T = 200"),)),
    "optax ogda_example": Script(f"{NOTEBOOKS}/ogda_example.ipynb", sizes=(("10**4", "500"),)),
    "optax perturbations": Script(f"{NOTEBOOKS}/perturbations.ipynb", sizes=(("steps = 200", "steps = 20"),)),
    "Equinox train_rnn": Script(
        f"{EQUINOX}/train_rnn.ipynb", _LOSS, (("size=10000", "size=1000"), ("=200", "=60"), _SEED), bfloat16=True
    ),
    "Equinox frozen_layer": Script(f"{EQUINOX}/frozen_layer.ipynb", sizes=(("steps=1000", "steps=100"), _SEED)),
    "Equinox stateful": Script(f"{EQUINOX}/stateful.ipynb", sizes=(("seed = 5678", "seed = SEED"),)),
    "Diffrax neural_ode": Script(
        f"{DIFFRAX}/neural_ode.ipynb", _LOSS, (("(500, 500)", "(20, 20)"), ("every=100", "every=10"), _SEED)
    ),
    "Diffrax latent_ode": Script(
        f"{DIFFRAX}/latent_ode.ipynb",
        _LOSS,
        (
            ("size=10000", "size=256"),
            ("size=256", "size=32"),
            ("steps=250", "steps=11"),
            ("every=50", "every=5"),
            _SEED,
        ),
    ),
    "Diffrax neural_cde": Script(
        f"{DIFFRAX}/neural_cde.ipynb", _LOSS, (("size=256", "size=64"), ("steps=20", "steps=5"), _SEED), bfloat16=True
    ),
    "PureJaxRL ppo": Script("purejaxrl/purejaxrl/ppo.py", r"return=(\S+)", _PPO, bfloat16=True),
}

LEFT_OUT = {
    "JAX resnet50": "it is no longer in the repository",
    "JAX differentially_private_sgd": "it needs dp_accounting",
    "Flax imagenet, mnist, vae, seq2seq, sst2, lm1b, wmt, nlp_seq, ogbg": "they read or log with TensorFlow, whose "
    "data this table does not make",
    "Flax ppo": "it needs Atari's emulator",
    "Flax 05_vae": "it downloads its data",
    "Haiku imagenet, rnn": "they read with TensorFlow",
    "Haiku mnist_gan": "its notebook reads with TensorFlow",
    "Haiku impala": "it needs bsuite",
    "Hugging Face Transformers": "its repository was too large to fetch",
    "big_vision": "it reads with TensorFlow",
    "optax muon, rosenbrock_ademamix": "they train nothing with a matmul",
    "optax nanolm, mlp_mnist, lookahead_mnist, cifar10_resnet": "they read with TensorFlow or grain",
    "Equinox mnist, score_based_diffusion": "they download their data",
}


def row_of(folder: pathlib.Path, script: Script) -> dict[str, Any]:
    """The results of a script: in float32 by seeds, in half, and with a first scale that overflows."""
    with tempfile.TemporaryDirectory() as cache:
        return _row(lambda *args, **options: run(folder, script, cache, *args, **options), script)


def _row(run: Callable[..., dict[str, Any]], script: Script) -> dict[str, Any]:
    plain = [run(SEEDS[0])]
    if plain[0]["code"]:
        return {"error": plain[0]["error"]}
    plain += [run(seed) for seed in SEEDS[1:]]
    runs = {"float16": run(SEEDS[0], "mixed_float16", dump=True)}
    runs["planted"] = run(SEEDS[0], "mixed_float16", "--init-scale", "16777216")
    if script.bfloat16:
        runs["bfloat16"] = run(SEEDS[0], "mixed_bfloat16")
    faults = [f"{name}: exit code {found['code']}: {found['error']}" for name, found in runs.items() if found["code"]]
    faults += [f"{name}: other output" for name, found in runs.items() if found["shape"] != plain[0]["shape"]]
    faults += [f"{name}: says nothing" for name, found in runs.items() if not found["said"]]
    return {
        "float32": [found["result"] for found in plain],
        **{name: found["result"] for name, found in runs.items()},
        "share": runs["float16"]["share"],
        "repeated": sum(map(int, re.findall(r"(\d+) repeated at a lower", "\n".join(runs["planted"]["said"])))),
        "said": runs["float16"]["said"],
        "faults": faults,
    }


def run(
    folder: pathlib.Path, script: Script, cache: str, seed: int, policy: str = "", *flags: str, dump: bool = False
) -> dict[str, Any]:
    """One process of a script. Programs that an earlier process compiled come from the cache, a folder."""
    path = folder.resolve() / script.path
    repository = folder.resolve() / pathlib.Path(script.path).parts[0]
    with tempfile.TemporaryDirectory() as scratch, mnist_of_jax_examples(seed):
        here = pathlib.Path(scratch)
        copy, folder_of_dump = _copy(path, script.sizes, seed, here), here / "hlo"
        (here / "corpus.txt").write_text(corpus(seed))
        if (repository / "examples").exists():  # which the scripts import as a package
            (here / "examples").symlink_to(repository / "examples")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (STAND_INS, path.parent, ROOT))),
            "FOREIGN_SEED": str(seed),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "MPLBACKEND": "Agg",
            "TMPDIR": scratch,
            # A script may set XLA_FLAGS itself: then nothing is dumped, and the share is unknown.
            "XLA_FLAGS": "--xla_backend_optimization_level=0"
            + (f" --xla_dump_to={folder_of_dump} --xla_dump_hlo_as_text" if dump else ""),
        }
        launcher = ["-m", "mpjax", "run", "--policy", policy, *flags] if policy else []
        args = [arg.replace("HERE", scratch) for arg in script.args]
        try:
            done = subprocess.run(
                [sys.executable, *launcher, str(copy), *args],
                cwd=scratch,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess([], 1, "", f"over {SECONDS} s")
        share = half_share(folder_of_dump)
    # The launcher writes numbers to stderr too: only a pattern of the script's own is looked for there.
    found = re.findall(script.result, done.stdout if script.result == _ANY else done.stdout + done.stderr)
    return {
        "code": done.returncode,
        "error": (
            [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception|over)\b", line)] or [""]
        )[-1][:150],
        "result": float(found[-1].rstrip(",}'")) if found else None,
        "share": None if share is None else round(share, 4),
        "shape": re.sub(r"[\d.e+-]+|nan|\s+", "#", done.stdout),
        "said": _said(done.stderr),
    }


def _said(stderr: str) -> list[str]:
    """The lines that the launcher printed: those of its blocks."""
    return [line.replace(tempfile.gettempdir(), "") for line in re.findall(r"(?m)^mpjax run: .*(?:\n  +\S.*)*", stderr)]


def _copy(path: pathlib.Path, sizes: tuple[tuple[str, str], ...], seed: int, folder: pathlib.Path) -> pathlib.Path:
    """The script, or the cells of a notebook in one file, with other sizes."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for old, new in sizes:
        if old not in text:
            raise ValueError(f"{path}: no {old!r}")
        text = text.replace(old, new.replace("SEED", str(seed)))
    copy = folder / f"{path.stem}.py"
    copy.write_text(text)
    return copy


def verdict(row: dict[str, Any]) -> str:
    """Whether results in half are within the spread of the seeds, or one percent, of the same seed in float32."""
    if "error" in row:
        return f"fails in float32: {row['error']}"
    first, faults = row["float32"][0], list(row["faults"])
    if (row["share"] or 0) < 0.9 and not re.search(r"nothing|in float32: | not: ", "\n".join(row["said"])):
        faults.append(f"{row['share']} in half, and nothing says why")
    if first is not None:
        allowed = max(max(row["float32"]) - min(row["float32"]), 0.01 * abs(first))
        for name in ("float16", "planted", "bfloat16"):
            value = row.get(name, first)
            if value is None or not abs(value - first) <= allowed:
                faults.append(f"{name}: {value}")
    return "; ".join(faults) or "yes"


def table(rows: dict[str, Any]) -> str:
    """Markdown: a row for each script, and why others are left out."""
    columns = "script | in half | float32, three seeds | float16 | first scale 2**24 | bfloat16 | right"
    lines = [f"| {columns} |", "|---" * 7 + "|"]
    for name, row in sorted(rows.items()):
        if "error" in row:
            lines.append(f"| {name} | | | | | | {verdict(row)} |")
            continue
        planted = f"{_number(row['planted'])} ({row['repeated']})"
        seeds = ", ".join(map(_number, row["float32"]))
        cells = [_share(row), seeds, _number(row["float16"]), planted, _number(row.get("bfloat16"))]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + f" | {verdict(row)} |")
    left = [f"- {name}: {why}." for name, why in LEFT_OUT.items()]
    if waiting := [name for name in SCRIPTS if name not in rows]:
        left.append(f"- Not run yet: {', '.join(waiting)}.")
    return "\n".join([*lines, "", NOTE, "", "Left out:", "", *left]) + "\n"


NOTE = (
    "In half: the share of FLOPs of matmuls and convolutions in programs with a backward pass, counted in their HLO. "
    "It includes branches that run only after an overflow, where the HLO does not tell them apart. "
    "Numbers: what the script prints last; float16 has the first of the seeds. In brackets: gradients repeated at a "
    "lower loss scale; each of its programs comes from a cache if an earlier run compiled it. Right: exit "
    "code 0, the same output except for numbers, a report of the launcher, and results that differ from the "
    "same seed in float32 by no more than the seeds do, or by one percent."
)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _share(row: dict[str, Any]) -> str:
    if row["share"]:
        return f"{row['share']:.1%}"
    said = "\n".join(row["said"])
    reasons = {"no optimizer was built": "by hand: float32, said so", "outside of jax.jit": "eager: float32, said so"}
    return next((text for key, text in reasons.items() if key in said), "no matmul" if "no matmul" in said else "none")
