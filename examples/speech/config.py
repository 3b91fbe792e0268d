"""The flags of `python -m examples.speech`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from examples.common.cli import UsageError
from examples.common.config import (
    BENCHMARK,
    BENCHMARKS,
    BUILD,
    DATA,
    FILES,
    MEASURE,
    MODEL,
    TRAIN,
    TRAINING,
    WHAT,
    Group,
    RunConfig,
)
from examples.common.flags import Foreign
from examples.common.optimizers import Recipe
from examples.speech.augmentation import NO_PERTURBATION, Perturbation
from examples.speech.corpus import DEFAULT_CACHE
from examples.speech.features import Features

# Speed benchmarks use synthetic audio.
SPOKEN = (*TRAIN, "find_batch_size")
DECODING = Group("decoding", ("train", "compare", "evaluate", "predict", *BENCHMARKS))

_RECIPE = Recipe(20, 16, 3e-3, 1.0, "adamw", 1e-2, clip_norm=10.0)

# Mozilla's flags for DeepSpeech.
_CUDNN = Foreign(says="there is one recurrent layer for all devices, and its checkpoints fit everywhere")
_FOREIGN = {
    "--automatic_mixed_precision": Foreign(
        "--policy mixed_float16", "is --policy mixed_float16 (which is the default)"
    ),
    "--train_files": Foreign("--train-data"),
    "--dev_files": Foreign("--dev-data"),
    "--test_files": Foreign("--test-data"),
    "--alphabet_config_path": Foreign("--alphabet"),
    "--n_hidden": Foreign("--hidden"),
    "--dropout_rate": Foreign("--dropout"),
    "--train_batch_size": Foreign("--batch-size"),
    "--checkpoint_dir": Foreign("--output"),
    "--one_shot_infer": Foreign("--infer"),
    "--es_epochs": Foreign("--patience"),
    "--load_cudnn": _CUDNN,
    "--train_cudnn": _CUDNN,
    "--use_cudnn_rnn": _CUDNN,
    "--early_stop": Foreign(says="say after how many epochs: --patience N"),
}


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Trains a speech recogniser in mixed precision, tests it, and measures how fast it is."""

    script = "speech"
    unit = "utterances"
    foreign = _FOREIGN
    may_change = (*RunConfig.may_change, "max_skipped", "workers")

    mode: Literal[  # type: ignore[misc]  # a field with a default, though its base has it without
        "train_and_evaluate", "train", "evaluate", "predict", "training_benchmark", "inference_benchmark"
    ] = WHAT(
        "train_and_evaluate",
        "train with a test after each epoch or without, test or use the model in --output (predict is "
        "--infer), or "
        "measure speed (of made-up audio)",
        decides=True,
    )
    infer: tuple[Path, ...] = FILES(
        (), "print what is said in these audio files, by the model in --output or --weights", uses=("predict",)
    )

    train_data: Path | None = DATA(
        None,
        "training speech: a Mozilla CSV (wav_filename,wav_filesize,transcript), a folder as LibriSpeech has it, or "
        "shards (TFRecord, ArrayRecord, WebDataset, a saved Hugging Face dataset); without it digit strings, dates and "
        "commands that espeak-ng speaks",
        uses=SPOKEN,
    )
    dev_data: Path | None = DATA(
        None, "speech to test on after each epoch, as --train-data; by default that of --test-data", uses=SPOKEN
    )
    test_data: Path | None = DATA(None, "test speech, as --train-data")
    alphabet: Path | None = DATA(
        None,
        "file with a character a line, as DeepSpeech has it; by default space, a to z and the apostrophe",
        uses=BUILD,
    )
    cache_dir: Path = DATA(DEFAULT_CACHE, "folder that the corpus of espeak-ng is kept in", decides=False)
    longest_seconds: float | None = DATA(None, "training utterances that are longer are left out", uses=SPOKEN)
    max_skipped: float = DATA(0.01, "share of the utterances that may be skipped as unusable; more is an error")

    model: Literal["deepspeech", "deepspeech2"] = MODEL(
        "deepspeech", "dense layers around a recurrent one, or convolutions and then recurrent layers"
    )
    hidden: int = MODEL(128, "units of dense layers and of each direction of recurrent ones (DeepSpeech: 2048)")
    cell: Literal["rnn", "gru", "lstm"] = MODEL("gru", "of the recurrent layers; rnn is DeepSpeech's clipped ReLU")
    bidirectional: bool = MODEL(True, "whether the recurrent layers also run backward in time")
    stride: int = MODEL(3, "frames (of 10 ms) from one output of the model to the next")
    context: int = MODEL(5, "deepspeech: frames on either side that the first layer sees")
    layer_norm: bool = MODEL(True, "deepspeech: layer normalisation before each clipped ReLU")
    layers: int = MODEL(2, "deepspeech2: recurrent layers (paper: 7)")
    channels: int = MODEL(8, "deepspeech2: of its convolutions (paper: 32)")
    lookahead: int = MODEL(0, "deepspeech2: frames that a row convolution sees ahead, for --no-bidirectional")
    dropout: float = MODEL(0.05, "share of units dropped in training")
    features: Literal["log_mel", "mfcc"] = MODEL("log_mel", "what the model sees of the audio")
    mels: int = MODEL(40, "mel bands, of log_mel and of the mfcc (whose first 26 coefficients are taken)")

    augment: bool = TRAINING(True, "SpecAugment, and random speed and volume")
    buckets: int = TRAINING(2, "lengths that utterances are padded to; each is compiled for", uses=(*BUILD, "evaluate"))

    decoder: Literal["greedy", "beam"] = DECODING(
        "greedy", "how the last test and --infer find the text; the tests before it are greedy"
    )
    beam: int = DECODING(16, "prefixes that the beam decoder keeps")
    report: int = DECODING(5, "how many of the worst, median and best transcripts are printed")

    longest: float = BENCHMARK(
        4.0,
        "seconds of the longest utterance of a batch; the others are spread evenly from a quarter of it",
        uses=(*MEASURE, "compare"),
    )
    warmup_steps: int = BENCHMARK(10, "steps before those that are measured", uses=BENCHMARKS)
    num_iter: int = BENCHMARK(50, "steps that are measured", uses=(*BENCHMARKS, "compare"))

    def _check_numbers(self) -> None:
        super()._check_numbers()
        for name in ("buckets", "hidden", "stride", "layers", "channels", "beam"):
            self._require(name, lambda x: x >= 1, "must be 1 or more")
        self._require("mels", lambda x: x >= 26, "must be 26 or more")
        for name in ("context", "lookahead", "report"):
            self._require(name, lambda x: x >= 0, "must be 0 or more")
        for name in ("longest", "longest_seconds"):
            self._require(name, lambda x: 0 < x < float("inf"), "must be a positive number")
        for name in ("dropout", "max_skipped"):
            self._require(name, lambda x: 0 <= x < 1, "must be at least 0 and below 1")

    def _check_together(self) -> None:
        super()._check_together()
        if self.action in BUILD and (self.train_data is None) != (self.test_data is None):
            given, missing = ("train", "test") if self.test_data is None else ("test", "train")
            raise UsageError(f"--{given}-data comes with --{missing}-data: give both, or neither.")
        if self.dev_data is not None and self.train_data is None:
            raise UsageError("--dev-data comes with --train-data and --test-data.")
        if self.lookahead and (self.model != "deepspeech2" or self.bidirectional):
            raise UsageError(
                f"--lookahead {self.lookahead}: only a --model deepspeech2 with --no-bidirectional looks ahead by it."
            )
        if self.mode == "predict" and not self.infer:
            raise UsageError("--mode predict: add --infer FILE, the audio to write down.")
        # The shortest utterance of a benchmark is a quarter of the longest, and must yield at least one frame.
        if self.is_benchmark and self.output_frames(int(self.longest / 4 * 16_000)) < self.stride:
            raise UsageError(f"--longest {self.longest}: a quarter of it is too short for the model; give 0.2 or more.")

    @property
    def action(self) -> str:
        return "predict" if self.infer else super().action

    @property
    def action_flag(self) -> str:
        return "--infer" if self.infer else super().action_flag

    @property
    def recipe_defaults(self) -> Recipe:
        return _RECIPE

    @property
    def perturbation(self) -> Perturbation:
        """The perturbation of training audio."""
        return Perturbation() if self.augment else NO_PERTURBATION

    @property
    def last_beam(self) -> int:
        """Number of prefixes that the final test keeps; 0 for greedy decoding."""
        return self.beam if self.decoder == "beam" else 0

    @property
    def front_end(self) -> Features:
        """The feature extractor."""
        return Features(self.features, self.mels)

    def output_frames(self, samples: Any) -> Any:
        """Number of output frames of the model for a number of samples."""
        return -(-self.front_end.frames(samples) // self.stride)
