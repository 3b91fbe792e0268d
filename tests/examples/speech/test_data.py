"""The speech example's data: corpus, manifests, audio files, features, augmentation, batches."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy  # which imports its packages when they are used
import soundfile

import mpjax
from examples.common.cli import UnusableFileError, UsageError
from examples.speech.audio import audio_length, read_audio
from examples.speech.batching import Buckets
from examples.speech.corpus import make_corpus
from examples.speech.dataset import Alphabet, read_csv
from examples.speech.features import (
    NO_PERTURBATION,
    Perturbation,
    features_of,
    frames_of,
    log_mel,
    samples_of,
    spec_augment,
)
from tests.examples.speech.runs import open_speech

SIZE = (20, 5)


def tone(samples, rate=16_000, hertz=440.0):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)).astype(np.float32)


def write_csv(folder, *rows, header="wav_filename,wav_filesize,transcript"):
    path = folder / "speech.csv"
    path.write_text("\n".join([header, *(f"{name},1,{transcript}" for name, transcript in rows)]) + "\n")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), *SIZE)


@pytest.fixture(scope="module")
def speech(corpus):
    return open_speech(corpus[0])


# The corpus.


def test_corpus_is_the_same_bit_for_bit_each_time(corpus, tmp_path):
    def digests(folder):
        files = sorted(path for path in folder.rglob("*.*") if path.is_file())
        return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    again = make_corpus(tmp_path / "new" / "cache", *SIZE)
    first = digests(corpus[0].parent)
    assert len(first) == 25 + 2
    assert digests(again[0].parent) == first
    # No temporary files remain, and a cached corpus is not synthesised again.
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 1
    again[0].write_text("mark")
    assert make_corpus(tmp_path / "new" / "cache", *SIZE) == again
    assert again[0].read_text() == "mark"


def test_impossible_corpus_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be kept in .*--cache-dir"):
        make_corpus(tmp_path / "file", *SIZE)
    monkeypatch.setattr("examples.speech.corpus._TEST_VARIANTS", ["nobody"])
    with pytest.raises(UsageError, match=r"cannot speak the corpus: it has no voice 'en-us\+nobody'.*--train-data"):
        make_corpus(tmp_path / "cache", 1, 1)
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(UsageError, match=r"spoken by espeak-ng. Install it with pip install .*--train-data"):
        make_corpus(tmp_path / "cache", 1, 1)


def test_corpus_splits_share_no_speaker_and_no_text(corpus):
    train, test = map(read_csv, corpus)
    assert (len(train), len(test)) == (20, 5)
    assert not {item.transcript for item in train} & {item.transcript for item in test}
    assert not {item.path.parent.name for item in train} & {item.path.parent.name for item in test}


def test_corpus_is_speech_of_a_second_or_two(speech):
    seconds = speech.samples / 16_000
    assert seconds.min() > 0.3
    assert seconds.max() < 3
    for index in range(len(speech)):
        audio = speech.load(index)
        assert 0.1 < np.abs(audio).max() <= 1
        # Speech has most of its energy in the telephone band.
        hertz, power = scipy.signal.welch(audio, 16_000)
        assert power[(hertz > 80) & (hertz < 4000)].sum() > 0.8 * power.sum()


# Manifests and files.


def test_files_of_any_rate_and_channels_become_16_khz_mono(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    left = tone(44_100, 44_100)
    soundfile.write(tmp_path / "b.wav", np.stack([left, 0 * left], axis=1), 44_100)
    soundfile.write(tmp_path / "c.flac", tone(8_000, 8_000), 8_000)
    speech = open_speech(write_csv(tmp_path, ("a.wav", "a b"), (tmp_path / "b.wav", "b'c "), ("c.flac", "c")))
    assert speech.transcripts == ["a b", "b'c", "c"]
    assert speech.samples.tolist() == [16_000] * 3
    assert speech.hours == pytest.approx(3 / 3600)
    middle = slice(1000, -1000)  # a filter rings at the ends
    for index, factor in enumerate((1, 0.5, 1)):
        audio = speech.load(index)
        assert audio.dtype == np.float32
        np.testing.assert_allclose(audio[middle], factor * tone(16_000)[middle], atol=2e-3)


def test_librispeech_tree_is_read(tmp_path):
    chapter = tmp_path / "19" / "198"
    chapter.mkdir(parents=True)
    (chapter / "19-198.trans.txt").write_text("19-198-0000 NORTHANGER ABBEY\n19-198-0001 THIS LITTLE WORK\n")
    for number in range(2):
        soundfile.write(chapter / f"19-198-000{number}.flac", tone(16_000), 16_000)
    speech = open_speech(tmp_path)
    assert speech.transcripts == ["northanger abbey", "this little work"]
    assert [path.name for path in speech.paths] == ["19-198-0000.flac", "19-198-0001.flac"]
    (chapter / "19-198.trans.txt").unlink()
    with pytest.raises(UsageError, match="has no transcripts: expected a LibriSpeech tree"):
        open_speech(tmp_path)


def test_unusable_files_are_skipped_named_and_counted(tmp_path, capsys):
    noise = np.random.default_rng(0).normal(size=16_000).astype(np.float32) * 0.1
    soundfile.write(tmp_path / "good.wav", noise, 16_000)
    soundfile.write(tmp_path / "cut.flac", noise, 16_000)
    whole = (tmp_path / "cut.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) // 2])
    soundfile.write(tmp_path / "nan.wav", np.where(np.arange(16_000) == 5, np.nan, noise), 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "silent.wav", noise, 16_000)
    soundfile.write(tmp_path / "no-samples.wav", noise[:0], 16_000)
    whole = (tmp_path / "good.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[: len(whole) // 2])
    # A header written to a pipe, before the length was known.
    (tmp_path / "piped.wav").write_bytes(whole.replace(b"data" + whole[40:44], b"data" + b"\xff" * 4))
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("this is no audio at all")
    names = ("piped.wav", "cut.flac", "nan.wav", "cut.wav", "no-samples.wav", "empty.wav", "text.wav", "gone.wav")
    path = write_csv(tmp_path, *((name, "a") for name in names), ("silent.wav", ""))
    speech = open_speech(path, max_skipped=0.9)
    assert [path.name for path in speech.paths] == list(names[:3])
    # Files that fail only in decoding leave an empty row in the batch.
    (batch,) = Buckets(speech, 3).evaluation_batches()
    assert sorted(zip(batch.indices.tolist(), batch.weights.tolist(), strict=True)) == [(-1, 0), (-1, 0), (0, 1)]
    assert not batch.audio[batch.weights == 0].any()
    assert len(speech.skipped) == 8
    said = capsys.readouterr().err
    for name in (*names[1:], "silent.wav"):
        assert f"skipped: {tmp_path / name} (" in said
    assert Counter(reason.split(":")[0] for reason in speech.skipped.reasons.values()) == {
        "it holds no samples": 1,
        "the file is empty (0 bytes)": 1,
        "not readable as audio": 1,
        "it cannot be opened": 1,
        "its transcript is empty": 1,
        "damaged": 2,
        "it holds NaN or infinite samples": 1,
    }
    with pytest.raises(UsageError, match=r"2 of 9 files can't be used.*--max-skipped 0.01"):
        open_speech(path)
    strict = open_speech(write_csv(tmp_path, ("good.wav", "a"), ("cut.flac", "b")), max_skipped=0)
    with pytest.raises(UsageError, match=r"cut.flac' \(damaged"):  # from a loader thread
        list(Buckets(strict, 2).evaluation_batches())


def test_transcripts_that_ctc_cannot_align_are_skipped(tmp_path, capsys):
    # 3 frames: "aab" needs 4, because CTC needs a blank between the two a's.
    soundfile.write(tmp_path / "a.wav", tone(samples_of(3)), 16_000)
    soundfile.write(tmp_path / "b.wav", tone(samples_of(4)), 16_000)
    speech = open_speech(write_csv(tmp_path, ("a.wav", "aab"), ("b.wav", "aab")), max_skipped=0.5)
    speech.keep_decodable(frames_of)
    assert [path.name for path in speech.paths] == ["b.wav"]
    assert "it needs 4 frames but the model outputs 3 for 0.04 s of audio: 'aab'" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--max-skipped"):
        speech.keep_decodable(frames_of, fastest=1.1)


def test_characters_outside_the_alphabet_are_named(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    with pytest.raises(UsageError, match=r"alphabet: '3', 'é', first in 'caf\u00e9 3' of .*a.wav.*--alphabet"):
        open_speech(write_csv(tmp_path, ("a.wav", "a"), ("a.wav", "café 3")))
    assert len(open_speech(write_csv(tmp_path, ("a.wav", "café 3")), Alphabet("acfé 3"))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected a line wav_filename,transcript"),
        (b"wav_filename,wav_filesize,transcript\n", "is empty"),
        (b"path,text\na.wav,a\n", "has no column wav_filename and no column transcript; its first line is 'path,text'"),
        (b"wav_filename,transcript\na.wav\n", "line 2 lacks a transcript"),
        (b"wav_filename,transcript\n,a\n", "line 2 lacks a wav_filename"),
        (b"wav_filename,transcript\na.wav,caf\xe9\n", "cannot be read as a CSV file in UTF-8"),
    ],
)
def test_bad_csv_files_are_refused(content, message, tmp_path):
    path = tmp_path / "speech.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_speech(path)
    with pytest.raises(UsageError, match=r"there is no .*give a CSV file"):
        open_speech(tmp_path / "other.csv")


def test_alphabet_file_has_the_format_of_deepspeech(tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_text("# comment\n \na\n\\#\né\r\n# the last line\n", encoding="utf-8")
    alphabet = Alphabet.read(path)
    assert (alphabet.characters, alphabet.labels) == (" a#é", 5)
    assert alphabet.encode("a #").tolist() == [2, 1, 3]
    assert alphabet.decode([2, 0, 1, 3, 0]) == "a #"
    for text, message in (("a\nb\na\n", "line 3 repeats line 1"), ("ab\n", "'ab'"), ("a\n\nb\n", "space")):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            Alphabet.read(path)


# Features.


def noisy_sweep():
    t = np.arange(8000) / 16_000
    noise = np.random.default_rng(0).uniform(-0.05, 0.05, 8000)
    return (0.5 * np.sin(2 * np.pi * (200 * t + 3000 * t**2)) + noise).astype(np.float32)


def reference_log_mel(audio, mels=40):
    """In float64, window by window, each triangle by interpolation."""
    window = scipy.signal.get_window("hann", 400)
    starts = range(0, len(audio) - 400 + 1, 160)
    power = np.stack([np.abs(np.fft.rfft(audio[i : i + 400].astype(np.float64) * window, 512)) ** 2 for i in starts])
    to_mel = lambda f: np.where(f < 1000, 3 * f / 200, 15 + 27 * np.log(np.maximum(f, 1000) / 1000) / np.log(6.4))
    grid = np.linspace(0, 8000, 800_001)
    edges = np.interp(np.linspace(0, to_mel(8000.0), mels + 2), to_mel(grid), grid)
    bins = np.arange(257) * 16_000 / 512
    bands = [
        power @ (np.interp(bins, edges[i : i + 3], [0, 1, 0]) * 2 / (edges[i + 2] - edges[i])) for i in range(mels)
    ]
    return np.log(np.stack(bands, axis=1))


def test_features_match_a_float64_reference_and_librosa():
    audio = noisy_sweep()
    found = np.asarray(log_mel(audio))
    assert found.dtype == np.float32
    wanted = reference_log_mel(audio)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    # librosa 0.11.0 and 1.0.0, audio y: S = melspectrogram(y=y, sr=16000, n_fft=512, win_length=400, hop_length=160,
    # center=False, n_mels=40); log(S). It sets the window in the middle of its FFT's 512.
    frames = np.asarray([0, 20, 46])
    shifted = np.asarray(log_mel(audio[56:]))[frames][:, [0, 5, 20, 39]]
    recorded = [
        [-4.8811, -1.5248, -6.4740, -5.1758],
        [-6.4871, -6.0030, -5.4401, -5.6249],
        [-6.6773, -5.2650, -5.8351, -5.3576],
    ]
    np.testing.assert_allclose(shifted, recorded, atol=1e-3)


def test_padding_changes_no_frame():
    audio = noisy_sweep()
    lengths = np.array([8000, 7999, 3000, 560, 559, 400, 399, 0], np.int32)
    batch = np.where(np.arange(8000) < lengths[:, None], audio, 0).astype(np.float32)
    features = jax.jit(features_of)
    values, frames = (np.asarray(x) for x in features(batch, lengths))
    assert frames.tolist() == [48, 48, 17, 2, 1, 1, 0, 0]
    assert [samples_of(count) for count in (1, 2, 17)] == [400, 560, 2960]
    # Samples after the end of an utterance are arbitrary and must not affect any frame.
    dirty, _ = features(np.where(np.arange(8000) < lengths[:, None], audio, 0.7).astype(np.float32), lengths)
    np.testing.assert_array_equal(dirty, values)
    for item in (0, 2, 4):
        alone, _ = features(audio[None, : lengths[item]], lengths[item, None])
        np.testing.assert_allclose(values[item, : frames[item]], alone[0], atol=2e-4)
        assert not values[item, frames[item] :].any()
    np.testing.assert_allclose(values[0].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(values[0].std(axis=0), 1, atol=1e-3)


def test_features_stay_in_float32_under_autocast():
    audio = jax.ShapeDtypeStruct((2, 4000), jnp.float32)
    step = lambda x: jnp.sum(log_mel(x) @ jnp.ones((40, 8)))
    plan = mpjax.explain(step, audio)
    # The mel filters, then the model.
    assert [row.dtypes_in[0] for row in plan.rows if row.op == "dot_general"] == ["float32", "float16"]


# Augmentation.


def test_spec_augment_masks_within_each_length(monkeypatch):
    for name, value in {"TIME_MASKS": 1, "MAX_TIME": 8}.items():  # One band shows its own width.
        monkeypatch.setattr(f"examples.speech.features.{name}", value)
    features = jnp.ones((64, 50, 20))
    lengths = jnp.asarray(np.arange(64) % 51)
    augment = jax.jit(lambda key: spec_augment(key, features, lengths))
    masked = np.asarray(augment(jax.random.key(0)))
    assert set(np.unique(masked)) == {0, 1}
    np.testing.assert_array_equal(masked, augment(jax.random.key(0)))
    assert not np.array_equal(masked, augment(jax.random.key(1)))
    whole_frames, whole_bands = (masked == 0).all(axis=2), (masked == 0).all(axis=1)
    # Zeros fill whole frames or whole bands.
    np.testing.assert_array_equal(masked == 0, whole_frames[:, :, None] | whole_bands[:, None, :])
    widths = whole_frames.sum(axis=1)
    assert (widths <= np.minimum(8, 0.2 * np.asarray(lengths))).all()
    assert widths.max() == 8
    assert not whole_frames[np.arange(50) >= np.asarray(lengths)[:, None]].any()
    assert 0 < whole_bands.sum(axis=1).max() <= 16


def test_speed_and_volume_change_length_and_level():
    perturbation = Perturbation(speeds=(0.9, 1.0, 1.1), volume=6.0)
    lengths = perturbation.lengths(np.full(3, 9_900), np.arange(3))
    assert lengths.tolist() == [11_000, 9_900, 9_000]
    for speed, factor in enumerate(perturbation.speeds):
        audio = perturbation.apply(tone(9_900), speed, 0.5)
        assert audio.dtype == np.float32
        # A tone played faster has a higher pitch.
        np.testing.assert_allclose(audio[500:-500], 0.5 * tone(len(audio), hertz=440 * factor)[500:-500], atol=2e-3)
    gains = perturbation.draw(np.random.default_rng(0), 1000)[1]
    assert 20 * np.log10([gains.min(), gains.max()]) == pytest.approx([-6, 6], abs=0.1)


# Batches.


def assert_equal_batches(batches, others):
    for batch, other in zip(batches, others, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)


def test_training_batches_are_a_function_of_seed_and_epoch(speech):
    buckets = Buckets(speech, 4, 3, Perturbation())
    once = list(buckets.train_batches(3, 5))
    assert len(once) == buckets.steps == 5
    assert_equal_batches(once, buckets.train_batches(3, 5))
    assert_equal_batches(once[3:], buckets.train_batches(3, 5, first=3))
    other = list(buckets.train_batches(3, 6))
    assert any(not np.array_equal(a.indices, b.indices) for a, b in zip(once, other, strict=True))


@pytest.mark.parametrize("perturbation", [NO_PERTURBATION, Perturbation()])
def test_training_batches_are_full_and_hold_no_utterance_twice(speech, perturbation):
    buckets = Buckets(speech, 3, 3, perturbation)
    batches = jax.device_get(list(buckets.train_batches(0, 0)))
    indices = np.concatenate([batch.indices for batch in batches])
    assert len(set(indices.tolist())) == 18
    assert len({batch.audio.shape for batch in batches}) > 1
    for batch in batches:
        assert (*batch.audio.shape, batch.labels.shape[1]) in buckets.shapes
        assert frames_of(batch.audio.shape[1]) % 16 == 0
        assert (batch.weights == 1).all()
        for row, index in enumerate(batch.indices):
            length = batch.audio_lengths[row]
            assert not batch.audio[row, length:].any()
            if perturbation is NO_PERTURBATION:
                np.testing.assert_array_equal(batch.audio[row, :length], read_audio(speech.paths[index]))
            text = speech.alphabet.decode(batch.labels[row, : batch.label_lengths[row]])
            assert text == speech.transcripts[index]


@pytest.mark.parametrize("batch_size", [3, 100])
def test_every_utterance_is_evaluated_once(speech, batch_size):
    buckets = Buckets(speech, batch_size, 2, Perturbation())
    batches = jax.device_get(list(buckets.evaluation_batches()))
    counted = np.concatenate([batch.indices[batch.weights > 0] for batch in batches])
    assert sorted(counted.tolist()) == list(range(20))
    # As few as possible are padded to the longest length.
    short = np.count_nonzero(speech.samples <= buckets.shapes[0].samples)
    assert sum(batch.audio.shape[1] == buckets.shapes[0].samples for batch in batches) == short // batch_size
    lengths = np.concatenate([batch.audio_lengths[batch.weights > 0] for batch in batches])
    np.testing.assert_array_equal(lengths, speech.samples[counted])


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
def test_joined_and_headerless_files_are_refused_not_cut(rate, tmp_path):
    """Of these, libsndfile reads the first part alone, without an error."""
    loud = np.random.default_rng(0).normal(0, 0.2, 3 * rate)
    samples = np.concatenate([np.sin(np.arange(2 * rate) / 20) / 3, loud])
    for kind in ("mp3", "ogg"):
        soundfile.write(tmp_path / f"one.{kind}", samples, rate)
        assert audio_length(tmp_path / f"one.{kind}") == pytest.approx(80_000, abs=1)
        content = (tmp_path / f"one.{kind}").read_bytes()
        (tmp_path / f"two.{kind}").write_bytes(2 * content)
        for read in (audio_length, read_audio):
            with pytest.raises(UnusableFileError, match=r"it holds (2 streams|10\.. s but its header says 5\.0 s)"):
                read(tmp_path / f"two.{kind}")
    content = (tmp_path / "one.mp3").read_bytes()
    second = content.index(content[:2], content.index(b"Xing"))
    (tmp_path / "bare.mp3").write_bytes(content[second:])
    with pytest.raises(UnusableFileError, match=r"it holds 5\.. s but its header says [0-4]\.. s"):
        audio_length(tmp_path / "bare.mp3")
    (tmp_path / "tagged.mp3").write_bytes(b"ID3\4\0\0" + bytes([0, 0, 0, 8]) + b"\xff\xfb\x90\0" * 2 + content)
    assert audio_length(tmp_path / "tagged.mp3") == pytest.approx(80_000, abs=1)


def test_implausible_rates_and_lengths_are_skipped_by_name(tmp_path):
    lines = ["wav_filename,wav_filesize,transcript"]
    for name, rate, seconds in (("one", 16_000, 1), ("long", 16_000, 9), ("slow", 10, 1), ("two", 8000, 1)):
        soundfile.write(tmp_path / f"{name}.wav", np.full(rate * seconds, 0.1), rate)
        lines.append(f"{name}.wav,0,{name}")
    (tmp_path / "all.csv").write_text("\n".join(lines))
    speech = open_speech(tmp_path / "all.csv", max_skipped=0.5, max_seconds=5)
    assert speech.transcripts == ["one", "two"]
    reasons = {Path(name).stem: reason for name, reason in speech.skipped.reasons.items()}
    assert reasons["long"] == "its 9 s are more than --max-seconds 5"
    assert reasons["slow"] == "its sample rate of 10 Hz is not plausible"


def test_characters_can_be_left_out_of_transcripts(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.full(16_000, 0.1), 16_000)
    row = 'a.wav,0,"well - it\'s ""so"", no?"'
    (tmp_path / "all.csv").write_text(f"wav_filename,wav_filesize,transcript\n{row}\n")
    with pytest.raises(UsageError, match=r"leave them out \(--drop-characters\)"):
        open_speech(tmp_path / "all.csv")
    assert open_speech(tmp_path / "all.csv", drop='-,?"').transcripts == ["well it's so no"]


def test_an_alphabet_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "alphabet.txt").write_text("a\nb\n", encoding="utf-8-sig")
    assert Alphabet.read(tmp_path / "alphabet.txt").characters == "ab"
