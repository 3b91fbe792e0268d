"""The flags of `python -m examples.speech`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import mpjax
from examples.common.cli import UsageError
from examples.speech.corpus import DEFAULT_CACHE
from examples.speech.features import Features

# Flags that say where and how to run but leave the trained model bit for bit the same: --resume may change them.
_NOT_PART_OF_THE_RUN = ("output", "resume", "save_every", "mode", "infer", "decoder", "beam", "report", "cache_dir")


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a speech recogniser (DeepSpeech or Deep Speech 2, CTC) in mixed precision and reports its word error rate."""

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

    output: Path | None = None
    """Folder for the checkpoint, metrics.jsonl, summary.json and curves.png; new or empty. Without
    it: the next number in runs/speech. With --infer or --mode evaluate: the run to take the model from."""

    resume: bool = False
    """Continue the interrupted run in --output from its newest checkpoint."""

    infer: Path | None = None
    """Print what is said in this audio file, by the model of the run in --output, in the precision of --policy."""

    model: Literal["deepspeech", "deepspeech2"] = "deepspeech"
    """DeepSpeech: dense layers around a recurrent one. Deep Speech 2: convolutions, then recurrent layers."""

    hidden: int = 192
    """Units of the dense layers, and of each direction of the recurrent ones (DeepSpeech: 2048)."""

    cell: Literal["rnn", "gru", "lstm"] = "gru"
    """Of the recurrent layers; rnn is the clipped ReLU of the first DeepSpeech."""

    bidirectional: bool = True
    """Whether the recurrent layers also run backward in time."""

    stride: int = 3
    """Frames (of 10 ms) from one output of the model to the next."""

    context: int = 5
    """DeepSpeech: frames on either side that the first layer sees."""

    layers: int = 2
    """Deep Speech 2: recurrent layers (paper: 7)."""

    channels: int = 8
    """Deep Speech 2: of its convolutions (paper: 32)."""

    lookahead: int = 0
    """Deep Speech 2: frames that a row convolution sees ahead, for --no-bidirectional; 0 for none."""

    dropout: float = 0.1
    """Share of units dropped in training."""

    features: Literal["log_mel", "mfcc"] = "log_mel"
    """What the model sees of the audio."""

    mels: int = 40
    """Mel bands, of log_mel and of the mfcc (of which the first 26 coefficients are taken)."""

    augment: bool = True
    """SpecAugment, and random speed and volume."""

    epochs: int = 12
    """Passes over the training utterances."""

    batch_size: int = 32
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

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "buckets", "hidden", "stride", "layers", "channels", "beam"):
            self._require(name, getattr(self, name) >= 1, "must be 1 or more")
        self._require("mels", self.mels >= 26, "must be 26 or more")
        for name in ("context", "lookahead", "report"):
            self._require(name, getattr(self, name) >= 0, "must be 0 or more")
        self._require("seed", 0 <= self.seed < 2**31, "must be between 0 and 2147483647")
        for name in ("learning_rate", "max_gradient_norm"):
            self._require(name, 0 < getattr(self, name) < math.inf, "must be a positive number")
        for name in ("warmup_epochs", "weight_decay", "save_every"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "must be 0 or more")
        for name in ("dropout", "max_skipped"):
            self._require(name, 0 <= getattr(self, name) < 1, "must be at least 0 and below 1")
        if (self.train_data is None) != (self.test_data is None):
            given, missing = ("train", "test") if self.test_data is None else ("test", "train")
            raise UsageError(f"--{given}-data comes with --{missing}-data: give both, or neither.")
        if self.resume and self.output is None:
            raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
        try:
            policy = mpjax.get_policy(self.policy)
        except ValueError as error:
            raise UsageError(f"--policy {self.policy!r}: {error}") from error
        if self.amp == "autocast" and policy.param_dtype != "float32":
            raise UsageError(
                f"--amp autocast keeps the parameters in float32, and --policy {self.policy!r} asks for "
                f"{policy.param_dtype} ones; take --amp module, or a policy such as mixed_float16."
            )

    @property
    def front_end(self) -> Features:
        """What computes the features."""
        return Features(self.features, self.mels)

    def output_frames(self, samples: Any) -> Any:
        """Frames that the model puts out for so many samples."""
        return -(-self.front_end.frames(samples) // self.stride)

    def settings(self) -> dict[str, Any]:
        """What decides the result, as JSON: what a resumed run must have in common with its first part."""
        settings = dataclasses.asdict(self)
        for name in _NOT_PART_OF_THE_RUN:
            settings.pop(name, None)
        return {name: str(x.absolute()) if isinstance(x, Path) else x for name, x in settings.items()}

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(self, name)}: {what}.")
