"""Runs the scripts of `scripts.toml` in float32 and under the launcher, and compares what they print."""

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
import tomllib
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


HUGGING_FACE = "transformers/examples/flax"


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


def _read(entry: dict[str, Any], settings: dict[str, Any]) -> Script:
    """A script of the table."""
    config = settings.get(entry.pop("like", ""), {}) | entry.pop("config", {})
    args = [
        *(_hugging_face(**entry.pop("hugging_face")) if "hugging_face" in entry else ()),
        *_flags(**entry.pop("flags", {})),
        *(_config(**config) if config else ()),
        *entry.pop("args", ()),
    ]
    return Script(args=tuple(args), sizes=tuple(entry.pop("sizes", {}).items()), **entry)


_TABLE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
SCRIPTS = {name: _read(entry, _TABLE["settings"]) for name, entry in _TABLE["scripts"].items()}
LEFT_OUT = _TABLE["left_out"]


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
