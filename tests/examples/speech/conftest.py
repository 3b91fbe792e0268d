"""Fixtures of the speech script's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.examples.speech.runs import as_flags

RATE = 16_000
WORDS = ("on", "off", "up", "no")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rising tones with one word each, as arguments of `Config`: eight for training and four for testing.

    The frames of a steady tone are equal up to rounding, which the normalisation of the features would amplify.
    """
    folder = tmp_path_factory.mktemp("data")
    for name, count in {"train": 8, "test": 4}.items():
        lines = ["wav_filename,wav_filesize,transcript"]
        for index in range(count):
            time = np.arange(RATE // 5 + 400 * index) / RATE
            path = folder / f"{name}{index}.wav"
            soundfile.write(path, 0.3 * np.sin(2 * np.pi * (300 * (1 + index % 4) + 500 * time) * time), RATE)
            lines.append(f"{path.name},0,{WORDS[index % 4]}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return {f"{name}_data": folder / f"{name}.csv" for name in ("train", "test")}


@pytest.fixture(scope="session")
def data_flags(data: dict[str, Path]) -> list[str]:
    return as_flags(**data)
