"""The flags of `python -m examples.speech`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from examples.common import config as run
from examples.common.cli import UsageError
from examples.common.flags import Count, Group, Natural, Positive, Share, TwoOrMore
from examples.speech.corpus import DEFAULT_CACHE
from examples.speech.features import NO_PERTURBATION, Perturbation, frames_of

_TESTED = (*run.TRAIN, "evaluate")  # actions that read the speech of the flags
_BATCHED = (*run.BUILD, "evaluate")
DATA = Group("data", _TESTED, stored="free")  # what a resumed run must find again is `Task.identity`


@dataclasses.dataclass(frozen=True)
class Config(run.RunConfig):
    """Trains a speech recogniser in mixed precision, tests it, and measures how fast it is."""

    script = "speech"
    unit = "utterances"
    of_tests = (*run.RunConfig.of_tests, "dev_data")

    infer: tuple[Path, ...] = run.FILES((), "transcribe these audio files with the model of the run", uses=("predict",))

    train_data: Path | None = DATA(None, "CSV, LibriSpeech or shards (default: synthesised)", uses=run.TRAIN)
    dev_data: Path | None = DATA(None, "speech to test on after each epoch (default: --test-data)", uses=run.TRAIN)
    test_data: Path | None = DATA(None, "test speech, in a format of --train-data")
    audio_field: str | None = DATA(None, "field of the audio in shards (default: any usual name)")
    text_field: str | None = DATA(None, "field of the transcript in shards (default: any usual name)")
    alphabet: Path | None = DATA(None, "file with one character per line (default: space, a to z, ')", uses=run.BUILD)
    cache_dir: Path = DATA(DEFAULT_CACHE, "folder for the corpus synthesised by espeak-ng")
    drop_characters: str = DATA("", "characters to leave out of the transcripts, such as '.,?!'")
    max_seconds: Positive = DATA(60.0, "longest utterance; longer ones are skipped, since batches pad to the longest")
    max_skipped: Share = DATA(0.01, "largest share of the utterances that may be skipped as unusable")

    hidden: Count = run.MODEL(128, "units of dense layers and of each direction of the recurrence (DeepSpeech: 2048)")
    cell: Literal["rnn", "gru", "lstm"] = run.MODEL("gru", "recurrent cell; rnn is DeepSpeech's, with a clipped ReLU")
    bidirectional: bool = run.MODEL(True, "also run the recurrent layer backward in time")
    stride: Count = run.MODEL(3, "number of 10 ms frames per output of the model")
    context: Natural = run.MODEL(5, "frames on either side that the first layer sees")
    layer_norm: bool = run.MODEL(True, "layer normalisation before each clipped ReLU")
    dropout: Share = run.MODEL(0.05, "dropout rate", uses=run.STEP)

    augment: bool = run.TRAINING(True, "apply SpecAugment and random changes of speed and volume")
    buckets: Count = run.TRAINING(2, "number of lengths to pad utterances to", uses=_TESTED)

    # Audio files are transcribed one by one, on one device.
    batch_size: Count = run.RECIPE(None, "utterances per step, over all devices together", uses=_BATCHED)
    devices: int | None = run.DEVICES(None, "number of devices that share a batch (default: all)", uses=_BATCHED)
    workers: Count | None = run.DEVICES(None, "number of threads that load data (default: one per core)", uses=_TESTED)

    longest: Positive = run.BENCHMARK(4.0, "longest utterance in seconds; others from a quarter of it")
    warmup_steps: Natural = run.BENCHMARK(10, "steps to run before measuring")
    num_iter: TwoOrMore = run.BENCHMARK(50, "number of steps to measure")

    def _check_together(self) -> None:
        super()._check_together()
        if self.action in run.TRAIN and (self.train_data is None) != (self.test_data is None):
            given, missing = ("train", "test") if self.test_data is None else ("test", "train")
            raise UsageError(f"--{given}-data comes with --{missing}-data: give both, or neither.")
        if self.dev_data is not None and self.train_data is None:
            raise UsageError("--dev-data comes with --train-data and --test-data.")
        if "cache_dir" in self.given and self.test_data is not None:
            raise UsageError(f"--cache-dir {self.cache_dir} has no effect with --test-data; leave one of them out.")
        if self.infer and self.weights and self.output:
            raise UsageError(f"--output {self.output} has no effect with --infer and --weights; leave it out.")
        if self.infer and "mode" in self.given and self.mode != "predict":
            raise UsageError(f"--infer transcribes: leave out --mode {self.mode}.")
        if self.mode == "predict" and not self.infer:
            raise UsageError("--mode predict: add --infer FILE, the audio to transcribe.")
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
    def recipe_defaults(self) -> dict[str, Any]:
        size = {"epochs": 20, "batch_size": 16, "learning_rate": 3e-3, "warmup_epochs": 1.0}
        return {**size, "optimizer": "adamw", "weight_decay": 1e-2, "clip_norm": 10.0}

    @property
    def perturbation(self) -> Perturbation:
        """The perturbation of training audio."""
        return Perturbation() if self.augment else NO_PERTURBATION

    def output_frames(self, samples: Any) -> Any:
        """Number of output frames of the model for a number of samples."""
        return -(-frames_of(samples) // self.stride)
