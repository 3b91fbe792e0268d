"""`python -m examples.speech.precision`: reports which of a trained model's values float16 would lose."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from examples.common.cli import UsageError, fail, markdown_table
from examples.common.flags import Group, parse
from examples.common.modes import open_model
from examples.speech.batching import Batch, Buckets
from examples.speech.config import Config
from examples.speech.corpus import DEFAULT_CACHE
from examples.speech.dataset import Alphabet
from examples.speech.models import create_network, ctc_losses
from examples.speech.task import Data, open_sets
from examples.speech.train import SpeechTask

PROGRAM = "python -m examples.speech.precision"

# Parts of a speech model by source file.
_PARTS = {
    "features.py": "features: spectrum, its logarithm, mean and deviation",
    "layers.py": "convolution: masks",
    "linear.py": "dense layers: sums of bias gradients over frames",
    "recurrence.py": "recurrent layer: gates, state, gradients over time",
    "_classification.py": "CTC: log-sum-exp over labels and alignments",
}
_FLAGS = Group("flags")
_RISKS = ("exp", "log", "pow", "sum", "softmax", "loss")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Runs a trained model from audio to loss and back, and reports where float16 would lose values."""

    output: Path = _FLAGS(Path("runs/speech/0001"), "run folder of examples.speech")
    policy: str = _FLAGS("mixed_float16", "policy whose half-precision operations are listed")
    batches: int = _FLAGS(2, "number of training batches to use")
    cache_dir: Path = _FLAGS(DEFAULT_CACHE, "folder for the corpus synthesised by espeak-ng")


class _TrainingSpeech(SpeechTask):
    """A trained model with its training set."""

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> Data:
        return open_sets(config, Alphabet((description or {})["characters"]), ["train"])


def loss_from_audio(config: Config, labels: int) -> Callable[[Any, Batch], jax.Array]:
    """The training loss as a function of parameters and audio, through features, model and CTC."""
    network = create_network(config, labels)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        features = config.front_end(batch.audio, batch.audio_lengths)
        return jnp.mean(ctc_losses(network.apply(params, *features, jax.random.key(0)), batch))

    return loss_fn


def losses_by_part(report: mpjax.inspection.NumericsReport) -> str:
    """The worst operations of each part of the program in float16: one row for each kind of error."""
    rows = []
    for part, what in _PARTS.items():
        # Matmuls run in half.
        here = [row for row in report.by_op if row.source.startswith(part) and row.op != "dot_general"]
        for kind in ("overflowed", "flushed", "absorbed"):
            worst = max(here, key=lambda row: getattr(row, kind), default=None)
            if worst is not None and getattr(worst, kind) > 0.001:
                share = f"{getattr(worst, kind):.1%}"
                rows.append([what, worst.op, worst.phase, kind, share, f"{worst.max:.3g}"])
    return markdown_table(("where", "operation", "pass", "in float16", "share", "largest value"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; usage errors exit with code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        flags = parse(Precision, PROGRAM, arguments)
        config = Config(mode="evaluate", output=flags.output, cache_dir=flags.cache_dir, devices=1)
        task, variables = open_model(config, _TrainingSpeech)
    except UsageError as error:
        fail(PROGRAM, error)
    trained: Config = task.config
    train_set = task.data.train
    labels = train_set.alphabet.labels
    buckets = Buckets(train_set, trained.preset.batch_size, trained.front_end, 1)
    batches = list(itertools.islice(buckets.train_batches(trained.seed, 0), flags.batches))
    float32 = dataclasses.replace(trained, policy="float32", amp="module")
    report = mpjax.numerics(loss_from_audio(float32, labels), variables.params, batches=batches)
    print(losses_by_part(report))
    for amp in ("module", "autocast"):
        loss_fn = loss_from_audio(dataclasses.replace(trained, policy=flags.policy, amp=amp), labels)
        audit = mpjax.audit(jax.grad(loss_fn), variables.params, batches[0])
        risks = [f"{risk.op} at {risk.source}" for risk in audit.risks if risk.kind in _RISKS]
        print(
            f"--amp {amp}: {audit.half_share:.1%} of all matmul FLOPs in half (the rest: mel bands and CTC); "
            f"exp, log and sums in half: {'; '.join(risks) or 'none'}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
