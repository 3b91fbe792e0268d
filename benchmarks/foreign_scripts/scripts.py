"""Runs the scripts of a table in float32 and under the launcher, and compares what they print."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from typing import Any

from benchmarks.commands import markdown
from benchmarks.foreign_scripts.data import mnist_of_jax_examples, write_models, write_texts
from benchmarks.foreign_scripts.hlo import digest, half_share

ROOT = pathlib.Path(__file__).parent.parent.parent
STAND_INS = pathlib.Path(__file__).parent / "stand_ins"
SEEDS = (0, 1, 2)
CPU_SECONDS = 400  # for a process
_ANY = r"(-?\d+\.\d+(?:e[+-]?\d+)?)"


@dataclasses.dataclass(frozen=True)
class Script:
    """A script or a notebook of a repository.

    Args:
        path: The file in the folder of repositories.
        result: A pattern whose last match in the output holds the number to compare.
        sizes: Numbers of the script that set its length or seed, and what replaces them: `("steps=200", "steps=20")`.
            `SEED` stands for the seed of the run. Nothing else of a script changes.
        args: Its arguments. `HERE` stands for a folder with generated data (`write_texts`), `REPO` for the script's own
            folder, `SEED` for the seed of the run.
        bfloat16: Whether it runs in bfloat16 too.
        examples: The number of examples of each split of a mocked data set.
    """

    path: str
    result: str = _ANY
    sizes: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()
    bfloat16: bool = False
    examples: int = 64


FLAX, TOYS, NOTEBOOKS = "flax/examples", "flax/examples/nnx_toy_examples", "optax/examples"
HUGGING_FACE = "transformers/examples/flax"
EQUINOX, DIFFRAX = "equinox/docs/examples", "diffrax/docs/examples"
_ACCURACY, _LOSS = r"Test set accuracy (\S+)", r"[lL]oss(?:: | ?= ?)([^\s,]+)"
_EPOCHS = ("num_epochs = 10\n", "num_epochs = 3\n")
_TOTAL = (("total_steps = 10_000", "total_steps = 1_001"),)
_KEEP_FLAGS = ("['XLA_FLAGS'] = '", "['XLA_FLAGS'] += ' ")  # or XLA would not dump the HLO
_SEED = ("seed=5678", "seed=SEED")
_PPO = (("5e5", "2048"), ("PRNGKey(30)", "PRNGKey(SEED)"))
_SMALL = {
    "vocab_size": 40,
    "max_corpus_chars": 1000,
    "per_device_batch_size": 8,
    "num_train_steps": 12,
    "num_eval_steps": 2,
    "num_predict_steps": 1,
    "eval_every_steps": 6,
    "warmup_steps": 4,
    "max_target_length": 32,
    "max_eval_target_length": 32,
    "max_predict_length": 16,
    "num_layers": 2,
    "qkv_dim": 32,
    "emb_dim": 32,
    "mlp_dim": 64,
    "num_heads": 2,
    "save_checkpoints": False,
    "restore_checkpoints": False,
    "seed": "SEED",
}


def _flags(**options: Any) -> tuple[str, ...]:
    return tuple(f"--{key}={value}" for key, value in options.items())


def _config(**options: Any) -> tuple[str, ...]:
    """The flags of a script of Flax that is configured by ml_collections."""
    changed = _flags(**{f"config.{key}": value for key, value in options.items()})
    return "--config=REPO/configs/default.py", *changed, "--verbosity=0", "--workdir=HERE/out"


def _hugging_face(model: str, file: str = "corpus.txt") -> tuple[str, ...]:
    """The flags of a script of Transformers, with a model made from a configuration."""
    names = _flags(config_name=f"MODELS/{model}", tokenizer_name=f"MODELS/{model}")
    files = _flags(train_file=f"HERE/{file}", validation_file=f"HERE/{file}", output_dir="HERE/out")
    sizes = _flags(per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2)
    others = _flags(logging_steps=4, eval_steps=4, learning_rate="1e-2", seed="SEED")
    return *names, *files, "--do_train", "--do_eval", *sizes, *others


SCRIPTS = {
    "JAX mnist_classifier": Script("jax/examples/mnist_classifier.py", _ACCURACY, (_EPOCHS,), bfloat16=True),
    "JAX mnist_vae": Script(
        "jax/examples/mnist_vae.py", r"(?m)^ *\d+ (-\S+) \(", (("num_epochs = 100", "num_epochs = 4"),), bfloat16=True
    ),
    "JAX mnist_classifier_fromscratch": Script("jax/examples/mnist_classifier_fromscratch.py", _ACCURACY, (_EPOCHS,)),
    "JAX spmd_mnist_classifier_fromscratch": Script(
        "jax/examples/spmd_mnist_classifier_fromscratch.py", _ACCURACY, (_EPOCHS,)
    ),
    "Flax 02_lifted_transforms": Script(f"{TOYS}/02_lifted_transforms.py", _LOSS, _TOTAL, bfloat16=True),
    "Flax 03_train_state": Script(f"{TOYS}/03_train_state.py", _LOSS, _TOTAL),
    "Flax 04_data_parallel_with_jit": Script(
        f"{TOYS}/04_data_parallel_with_jit.py", _LOSS, (("dataset(1000, 16)", "dataset(401, 16)"), _KEEP_FLAGS)
    ),
    "Flax 07_array_leaves": Script(f"{TOYS}/07_array_leaves.py", _LOSS, _TOTAL, bfloat16=True),
    "Flax 10_fsdp_and_optimizer": Script(
        f"{TOYS}/10_fsdp_and_optimizer.py", _LOSS, (("num_steps=10_000", "num_steps=1_001"), _KEEP_FLAGS)
    ),
    "Haiku mnist": Script(
        "dm-haiku/examples/mnist.py",
        r"'test', 'accuracy': '(\S+)'",
        (("range(3001)", "range(101)"), ("batch_size=1_000)", "batch_size=100)"), ("=10_000)", "=100)")),
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
    "Flax mnist": Script(
        f"{FLAX}/mnist/main.py", r"test_loss: ([^,]+)", args=_config(num_epochs=4, batch_size=16), bfloat16=True
    ),
    "Flax vae": Script(f"{FLAX}/vae/main.py", r"BCE: ([^,]+)", args=_config(num_epochs=2, batch_size=16)),
    "Flax imagenet": Script(
        f"{FLAX}/imagenet/main.py",
        r"eval epoch: 0, loss: ([^,]+)",
        args=_config(model="_ResNet1", batch_size=2, num_train_steps=2, steps_per_eval=2, profile=False),
        examples=4,
    ),
    "Flax seq2seq": Script(
        f"{FLAX}/seq2seq/train.py",
        r" loss=(\S+)",
        args=_flags(num_train_steps=61, hidden_size=32, batch_size=16, decode_frequency=20, verbosity=0),
        bfloat16=True,
    ),
    "Flax sst2": Script(
        f"{FLAX}/sst2/main.py",
        r"eval.* loss (\S+)",
        args=_config(num_epochs=2, batch_size=16, hidden_size=32, embedding_size=32, seed="SEED"),
    ),
    "Flax nlp_seq": Script(
        f"{FLAX}/nlp_seq/train.py",
        r"loss: (\S+)",
        args=_flags(
            train="HERE/pos.conllu",
            dev="HERE/pos.conllu",
            batch_size=16,
            num_train_steps=31,
            eval_frequency=15,
            max_length=16,
            random_seed="SEED",
            model_dir="HERE/out",
            verbosity=0,
        ),
    ),
    "Flax lm1b": Script(
        f"{FLAX}/lm1b/main.py",
        r"train_loss.?=([^,\s]+)",
        args=_config(**_SMALL, use_bfloat16=False, eval_per_device_batch_size=8),
    ),
    "Flax wmt": Script(
        f"{FLAX}/wmt/main.py",
        r"train_loss.?=([^,\s]+)",
        args=_config(**_SMALL, use_mixed_precision=False),
        bfloat16=True,
    ),
    "Flax ogbg_molpcba": Script(
        f"{FLAX}/ogbg_molpcba/main.py",
        r"train_loss.?=([^,\s]+)",
        args=(
            "--config=REPO/configs/test.py",
            "--config.latent_size=32",
            "--config.batch_size=8",
            "--workdir=HERE/out",
            "--verbosity=0",
        ),
    ),
    "Haiku rnn": Script(
        "dm-haiku/examples/rnn/train.py",
        r"loss.?: ([^,}]+)",
        args=_flags(
            training_steps=41,
            evaluation_interval=20,
            sampling_interval=20,
            hidden_size=32,
            sequence_length=16,
            sample_length=8,
            train_batch_size=4,
            eval_batch_size=4,
            seed="SEED",
            verbosity=0,
        ),
    ),
    "Hugging Face run_clm_flax": Script(
        f"{HUGGING_FACE}/language-modeling/run_clm_flax.py",
        r"Loss: ([^\s,)]+)",
        args=(*_hugging_face("gpt2"), "--block_size=32"),
        bfloat16=True,
    ),
    "Hugging Face run_mlm_flax": Script(
        f"{HUGGING_FACE}/language-modeling/run_mlm_flax.py",
        r"Loss: ([^\s,)]+)",
        args=(*_hugging_face("bert"), "--max_seq_length=32"),
    ),
    "Hugging Face run_flax_glue": Script(
        f"{HUGGING_FACE}/text-classification/run_flax_glue.py",
        r"Loss: ([^\s,)]+)",
        args=(
            *_hugging_face("bert", "corpus.csv"),
            *_flags(model_name_or_path="MODELS/bert", max_seq_length=32, eval_steps=40),
        ),
        bfloat16=True,
    ),
}

LEFT_OUT = {
    "JAX resnet50": "it is no longer in the repository",
    "JAX differentially_private_sgd": "it needs dp_accounting",
    "Flax ppo": "it needs Atari's emulator",
    "Flax 01_functional_api": "it changes a variable of another trace, which Flax 0.12 refuses",
    "Flax 05_vae, Equinox mnist, score_based_diffusion, deep_convolutional_gan": "they download their data",
    "Haiku impala": "it needs bsuite",
    "Haiku imagenet": "it evaluates on at least 10,000 images of 224 × 224 pixels, too many for this CPU",
    "Hugging Face run_t5_mlm_flax": "Transformers calls jnp.clip with an argument that JAX no longer has",
    "Hugging Face run_image_classification": "it reads with torchvision, whose build must match that of torch",
    "big_vision": "its input pipeline reads files of tensorflow_datasets, which mocked data sets do not have",
    "optax muon, rosenbrock_ademamix": "they train nothing with a matmul",
    "optax mlp_mnist, lookahead_mnist, cifar10_resnet": "they read with grain, which mocked data sets do not serve",
}


def entry_of(script: Script) -> str:
    """A hash of what the run of a script in float32 depends on: its entry, generated data and the version of JAX."""
    files = [pathlib.Path(__file__).parent / "data.py", STAND_INS / "sitecustomize.py"]
    return _hash([repr(script), version("jax"), *map(_statements, files)])


@functools.cache
def code() -> str:
    """A hash of the code of mpjax that a launched script runs, without comments and layout.

    A test checks that it runs no other part of mpjax.
    """
    parts = ("launcher", "casting", "kernels", "program", "loss_scale", ".")
    files = [file for part in parts for file in sorted((ROOT / "mpjax" / part).glob("*"))]
    texts = [_statements(file) if file.suffix == ".py" else file.read_text() for file in files if file.is_file()]
    return _hash(texts)


def _statements(file: pathlib.Path) -> str:
    return ast.dump(ast.parse(file.read_text()))


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def kept(folder: pathlib.Path, script: Script, row: dict[str, Any]) -> dict[str, Any] | None:
    """A row that was measured with other code of mpjax, if that code gives the same programs and results in half.

    What is the same is not measured again: the runs in float32, the first scale that overflows, and the time.
    """
    if "programs" not in row or row["script"] != entry_of(script):
        return None
    with tempfile.TemporaryDirectory() as cache:
        _write_models(script, cache)
        runs = {name: run(folder, script, cache, SEEDS[0], f"mixed_{name}", dump=True) for name in row["programs"]}
    same = all(
        found["code"] == 0 and found["programs"] == row["programs"][name] and found["result"] == row[name]
        for name, found in runs.items()
    )
    return row | {"code": code(), "said": runs["float16"]["said"]} if same else None


def row_of(folder: pathlib.Path, script: Script) -> dict[str, Any]:
    """The results of a script: in float32 by seeds, in half, and with a first scale that overflows."""
    head = {"script": entry_of(script), "code": code()}
    with tempfile.TemporaryDirectory() as cache:
        _write_models(script, cache)
        process = functools.partial(run, folder, script, cache)
        plain = [process(SEEDS[0])]
        if plain[0]["code"]:
            return {**head, "error": plain[0]["error"]}
        plain.append(process(SEEDS[1]))
        if plain[0]["result"] != plain[1]["result"]:  # Otherwise the number does not depend on the seed.
            plain.append(process(SEEDS[2]))
        runs = {
            "float16": process(SEEDS[0], "mixed_float16", dump=True),
            "planted": process(SEEDS[0], "mixed_float16", "--init-scale", "16777216"),
        }
        if script.bfloat16:
            runs["bfloat16"] = process(SEEDS[0], "mixed_bfloat16", dump=True)
    faults = [f"{name}: exit code {found['code']}: {found['error']}" for name, found in runs.items() if found["code"]]
    faults += [f"{name}: other output" for name, found in runs.items() if found["shape"] != plain[0]["shape"]]
    faults += [f"{name}: says nothing" for name, found in runs.items() if not found["said"]]
    return {
        **head,
        "programs": {name: found["programs"] for name, found in runs.items() if name != "planted"},
        "float32": [found["result"] for found in plain],
        **{name: found["result"] for name, found in runs.items()},
        "share": runs["float16"]["share"],
        # Both of these find their programs in the cache.
        "cpu_ratio": round(runs["planted"]["seconds"] / plain[1]["seconds"], 2),
        "repeated": sum(map(int, re.findall(r"(\d+) repeated at a lower", "\n".join(runs["planted"]["said"])))),
        "said": runs["float16"]["said"],
        "faults": faults,
        "cpu_seconds": round(sum(found["seconds"] for found in [*plain, *runs.values()])),
    }


def _write_models(script: Script, cache: str) -> None:
    if HUGGING_FACE in script.path:
        write_models(pathlib.Path(cache) / "models")


def run(
    folder: pathlib.Path, script: Script, cache: str, seed: int, policy: str = "", *flags: str, dump: bool = False
) -> dict[str, Any]:
    """One process of a script. Programs that an earlier process compiled come from the cache, a folder."""
    path = folder.resolve() / script.path
    repository = folder.resolve() / pathlib.Path(script.path).parts[0]
    mnist = mnist_of_jax_examples(seed) if script.path.startswith("jax/") else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as scratch, mnist:
        here = pathlib.Path(scratch)
        copy, folder_of_dump = _copy(path, script.sizes, seed, here), here / "hlo"
        write_texts(here, seed)
        for file in path.parent.glob("*.txt"):  # that the script looks for in its folder
            (here / file.name).symlink_to(file)
        (here / "accuracy").symlink_to(STAND_INS / "accuracy")
        if (repository / "examples").exists():  # which the scripts import as a package
            (here / "examples").symlink_to(repository / "examples")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (STAND_INS, path.parent, here, ROOT))),
            "FOREIGN_SEED": str(seed),
            "FOREIGN_EXAMPLES": str(script.examples),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HF_HOME": scratch,
            "HF_HUB_OFFLINE": "1",
            "USE_TF": "0",  # by Transformers
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "MPLBACKEND": "Agg",
            "TMPDIR": scratch,
            "XLA_FLAGS": "--xla_backend_optimization_level=0"
            + (f" --xla_dump_to={folder_of_dump} --xla_dump_hlo_as_text" if dump else ""),
        }
        launcher = ["-m", "mpjax", "run", "--policy", policy, *flags] if policy else []
        words = {"HERE": scratch, "REPO": str(path.parent), "MODELS": f"{cache}/models", "SEED": str(seed)}
        args = [re.sub("|".join(words), lambda word: words[word.group()], arg) for arg in script.args]
        before = _cpu_seconds()
        done = subprocess.run(
            ["prlimit", f"--cpu={CPU_SECONDS}", sys.executable, *launcher, str(copy), *args],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
        )
        seconds = _cpu_seconds() - before
        share, programs = half_share(folder_of_dump), digest(folder_of_dump)
    # The launcher writes numbers to stderr too: only a pattern of the script's own is looked for there.
    found = re.findall(script.result, done.stdout if script.result == _ANY else done.stdout + done.stderr)
    errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    ended = f"over {CPU_SECONDS} CPU seconds" if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL) else ""
    return {
        "code": done.returncode,
        "error": ended or "".join(errors[-1:])[:150],
        "result": float(found[-1].rstrip(",}'")) if found else None,
        "seconds": round(seconds, 2),
        "share": None if share is None else round(share, 4),
        "programs": programs,
        "shape": re.sub(r"([\d.e+-]|nan|\s)+", "#", done.stdout),  # an array's numbers have columns
        "said": _said(done.stderr),
    }


def _cpu_seconds() -> float:
    """The CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _said(stderr: str) -> list[str]:
    """The lines that the launcher printed: those of its blocks."""
    return [line.replace(tempfile.gettempdir(), "") for line in re.findall(r"mpjax run: .*(?:\n  +\S.*)*", stderr)]


def _copy(path: pathlib.Path, sizes: tuple[tuple[str, str], ...], seed: int, folder: pathlib.Path) -> pathlib.Path:
    """The script, or a copy with other sizes, or the cells of a notebook in one file."""
    if path.suffix == ".py" and not sizes:
        return path
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
    if (row["share"] or 0) < 0.9 and not re.search(r"nothing|in float32: | not: |no matmul", "\n".join(row["said"])):
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
    header = ("script", "in half", "float32, by seed", "float16", "first scale 2**24", "bfloat16", "CPU time", "right")
    lines = []
    for name, row in sorted(rows.items()):
        if "error" in row:
            lines.append((name, *[""] * 6, verdict(row)))
            continue
        planted = f"{_number(row['planted'])} ({row['repeated']})"
        seeds = ", ".join(map(_number, row["float32"]))
        cells = [_share(row), seeds, _number(row["float16"]), planted, _number(row.get("bfloat16")), row["cpu_ratio"]]
        lines.append((name, *cells, verdict(row)))
    left = [f"- {name}: {why}." for name, why in LEFT_OUT.items()]
    for what, names in (
        ("Not run yet", [name for name in SCRIPTS if name not in rows]),
        ("Measured with other code of mpjax", [name for name in rows if rows[name]["code"] != code()]),
    ):
        if names:
            left.append(f"- {what}: {', '.join(names)}.")
    return "\n".join([markdown(header, lines), NOTE, "", "Left out:", "", *left]) + "\n"


NOTE = (
    "In half: the share of FLOPs of matmuls and convolutions in programs with a backward pass, counted in their HLO. "
    "Branches that run only after an overflow do not count. "
    "Numbers: what the script prints last; float16 has the first of the seeds. In brackets: gradients repeated at a "
    "lower loss scale; each of its programs comes from a cache if an earlier run compiled it. CPU time: that run, "
    "from start to end, over one in float32 whose programs come from the cache too (XLA emulates float16 on a CPU, and "
    "the run repeats the steps that overflow). Right: exit "
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
