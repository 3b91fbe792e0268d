"""The flags of `python -m examples.speech`."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from examples.common.cli import UsageError
from examples.common.policies import check_policies
from examples.speech.augmentation import NO_PERTURBATION, Perturbation
from examples.speech.corpus import DEFAULT_CACHE
from examples.speech.features import Features

Mode = Literal["train_and_evaluate", "evaluate", "training_benchmark", "inference_benchmark"]

# Flags that say what to do with a training, and where; the others decide what it comes to.
_NOT_OF_THE_RUN = (
    *("mode", "output", "resume", "infer", "save_every", "cache_dir", "workers"),
    *("longest", "warmup_steps", "num_iter", "compare", "batch_sizes"),
)
BENCHMARKS = ("training_benchmark", "inference_benchmark")


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a speech recogniser in mixed precision, tests it, and measures how fast it is."""

    mode: Mode = "train_and_evaluate"
    """What to do: train with a test after each epoch, test the trained model in --output, or measure speed (of made-up
    audio)."""

    policy: str = "mixed_float16"
    """Precision: float32, mixed_float16, mixed_bfloat16, O0, O1, O2, O3, or dtypes such as
    "params=float32,compute=float16,output=float32"."""

    amp: Literal["module", "autocast"] = "module"
    """How the policy comes to the model: set on its modules (mpjax.with_policy), or on the traced operations
    (mpjax.autocast, for policies with float32 parameters)."""

    train_data: Path | None = None
    """Training speech: a Mozilla CSV (wav_filename,wav_filesize,transcript) or a folder as LibriSpeech has it.
    Without it: digit strings, dates and commands that espeak-ng speaks."""

    test_data: Path | None = None
    """Test speech, as --train-data."""

    alphabet: Path | None = None
    """File with a character a line, as DeepSpeech has it. Without it: the characters of the training transcripts."""

    cache_dir: Path = DEFAULT_CACHE
    """Folder that the corpus of espeak-ng is kept in."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["--results-dir"])] = None
    """Folder for checkpoints, metrics, summary.json, curves.png and event files; new or empty for a training.
    Without it: the next number in runs/speech. With --infer and --mode evaluate: the run that the model is from."""

    resume: bool = False
    """Continue the interrupted run in --output from its newest checkpoint."""

    infer: Path | None = None
    """Print what is said in this audio file, by the model of the run in --output, in the precision of --policy."""

    model: Literal["deepspeech", "deepspeech2"] = "deepspeech"
    """DeepSpeech: dense layers around a recurrent one. Deep Speech 2: convolutions, then recurrent layers."""

    hidden: int = 128
    """Units of the dense layers, and of each direction of the recurrent ones (DeepSpeech: 2048)."""

    cell: Literal["rnn", "gru", "lstm"] = "gru"
    """Of the recurrent layers; rnn is the clipped ReLU of the first DeepSpeech."""

    bidirectional: bool = True
    """Whether the recurrent layers also run backward in time."""

    stride: int = 3
    """Frames (of 10 ms) from one output of the model to the next."""

    context: int = 5
    """DeepSpeech: frames on either side that the first layer sees."""

    layer_norm: bool = True
    """DeepSpeech: layer normalisation before each clipped ReLU."""

    layers: int = 2
    """Deep Speech 2: recurrent layers (paper: 7)."""

    channels: int = 8
    """Deep Speech 2: of its convolutions (paper: 32)."""

    lookahead: int = 0
    """Deep Speech 2: frames that a row convolution sees ahead, for --no-bidirectional; 0 for none."""

    dropout: float = 0.05
    """Share of units dropped in training."""

    features: Literal["log_mel", "mfcc"] = "log_mel"
    """What the model sees of the audio."""

    mels: int = 40
    """Mel bands, of log_mel and of the mfcc (of which the first 26 coefficients are taken)."""

    augment: bool = True
    """SpecAugment, and random speed and volume."""

    epochs: int = 20
    """Passes over the training utterances."""

    batch_size: int = 16
    """Utterances in a step."""

    buckets: int = 2
    """Lengths that utterances are padded to; each is compiled for."""

    learning_rate: float = 3e-3
    """Peak of the cosine schedule of AdamW."""

    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises from zero to its peak."""

    weight_decay: float = 1e-2
    """Weight decay on kernels (not on biases and normalisation)."""

    max_gradient_norm: float = 10.0
    """Gradients are scaled down to this global norm."""

    decoder: Literal["greedy", "beam"] = "greedy"
    """How the last evaluation and --infer find the text; the evaluations before it are greedy."""

    beam: int = 16
    """Prefixes that the beam decoder keeps."""

    report: int = 5
    """How many of the worst, median and best transcripts are printed."""

    max_skipped: float = 0.01
    """Share of utterances of --train-data and --test-data that may be skipped as unusable; more is an error."""

    seed: int = 0
    """Of the initial weights, the order of the utterances and their augmentation."""

    save_every: float = 60.0
    """Seconds between two checkpoints (there is one at the end and on interruption anyway)."""

    workers: Annotated[int, tyro.conf.arg(help_behavior_hint="(default: number of cores)")] = os.cpu_count() or 1
    """Threads that read and change audio."""

    longest: float = 4.0
    """Benchmarks: seconds of the longest utterance of a batch; the others are spread evenly from a quarter of it."""

    warmup_steps: int = 10
    """Benchmarks: steps before those that are measured."""

    num_iter: int = 50
    """Benchmarks: steps that are measured."""

    compare: str | None = None
    """Benchmarks: policies, with commas between, to measure in turns in one process, as a table and a plot."""

    batch_sizes: str | None = None
    """Benchmarks: batch sizes of --compare, with commas between. Without it: --batch-size alone."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_precision()
        self._check_together()

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "buckets", "hidden", "stride", "layers", "channels", "beam", "workers"):
            self._require(name, getattr(self, name) >= 1, "must be 1 or more")
        self._require("num_iter", self.num_iter >= 2, "must be 2 or more")
        self._require("mels", self.mels >= 26, "must be 26 or more")
        for name in ("context", "lookahead", "report", "warmup_steps"):
            self._require(name, getattr(self, name) >= 0, "must be 0 or more")
        self._require("seed", 0 <= self.seed < 2**31, "must be between 0 and 2147483647")
        for name in ("learning_rate", "max_gradient_norm", "longest"):
            self._require(name, 0 < getattr(self, name) < math.inf, "must be a positive number")
        for name in ("warmup_epochs", "weight_decay", "save_every"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "must be 0 or more")
        for name in ("dropout", "max_skipped"):
            self._require(name, 0 <= getattr(self, name) < 1, "must be at least 0 and below 1")
        if self.batch_sizes is not None and not all(x.isdecimal() and int(x) for x in self.batch_sizes.split(",")):
            raise UsageError(f"--batch-sizes {self.batch_sizes!r}: give numbers with commas between, such as 16,32,64.")

    def _check_precision(self) -> None:
        check_policies(self.policies, "--policy" if self.compare is None else "--compare", self.amp)

    def _check_together(self) -> None:
        if (self.train_data is None) != (self.test_data is None):
            given, missing = ("train", "test") if self.test_data is None else ("test", "train")
            raise UsageError(f"--{given}-data comes with --{missing}-data: give both, or neither.")
        if self.lookahead and (self.model != "deepspeech2" or self.bidirectional):
            raise UsageError(
                f"--lookahead {self.lookahead}: only a --model deepspeech2 with --no-bidirectional looks ahead by it."
            )
        if self.compare is not None and not self.is_benchmark:
            raise UsageError("--compare measures speed: add --mode training_benchmark or inference_benchmark.")
        if self.output is None:
            if self.resume:
                raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
            if self.infer is not None or self.mode == "evaluate":
                what = "--infer" if self.infer is not None else "--mode evaluate"
                raise UsageError(f"{what} needs a trained model: add --output DIR, the folder of a training.")

    @property
    def policies(self) -> tuple[str, ...]:
        """All that are asked for."""
        return (self.policy,) if self.compare is None else tuple(self.compare.split(","))

    @property
    def is_benchmark(self) -> bool:
        """Whether only speed counts, not what is learned."""
        return self.mode in BENCHMARKS

    @property
    def perturbation(self) -> Perturbation:
        """How training audio is changed."""
        return Perturbation() if self.augment else NO_PERTURBATION

    @property
    def last_beam(self) -> int:
        """Prefixes that the last test keeps; 0 where it is greedy."""
        return self.beam if self.decoder == "beam" else 0

    @property
    def front_end(self) -> Features:
        """What computes the features."""
        return Features(self.features, self.mels)

    def output_frames(self, samples: Any) -> Any:
        """Frames that the model puts out for so many samples."""
        return -(-self.front_end.frames(samples) // self.stride)

    def settings(self) -> dict[str, Any]:
        """What decides the result, as JSON: what a resumed run must have in common with its first part."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        kept = {name: value for name, value in fields.items() if name not in _NOT_OF_THE_RUN}
        return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in kept.items()}

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(self, name)}: {what}.")
