"""Data, weights and flags in the forms that people have them in."""

from __future__ import annotations

import shutil
import sys
import tarfile
import types
from pathlib import Path

import numpy as np
import pytest
import soundfile

from examples.common.cli import UsageError, each_readable
from examples.common.flags import parse, stored_flags
from examples.common.records import UnusableFileError, content
from examples.common.training import Variables
from examples.common.weights import open_arrays
from examples.imagenet.config import Config
from examples.imagenet.decoding import View
from examples.imagenet.image_folder import ImageFolder, open_image_folder
from examples.speech.config import Config as SpeechConfig
from tests.examples.common.test_records import rows_of, write_hugging_face, write_tar
from tests.examples.imagenet.image_tree import CLASSES
from tests.examples.speech.runs import open_speech


def opened(root: Path, **options) -> list[ImageFolder]:
    return open_image_folder(root, View(16, flip=False), 0.0, **options)


def same(one: list[ImageFolder], other: list[ImageFolder]) -> None:
    for a, b in zip(one, other, strict=True):
        found, wanted = (folder.load(np.arange(len(folder)), None) for folder in (a, b))
        np.testing.assert_array_equal(found.images, wanted.images)
        np.testing.assert_array_equal(found.labels, wanted.labels)


def test_folders_win_over_archives_beside_them_and_val_has_other_names(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    for name in ("train.tar", "val.tar.gz"):
        tarfile.open(root / name, "w").close()
    for word in ("valid", "test"):
        (root / ("val" if word == "valid" else "valid")).rename(root / word)
        same(opened(root), opened(photos))


def test_entries_of_a_tar_have_images_of_several_kinds_and_names_in_txt(photos, tmp_path):
    train, val = opened(photos)
    for split, folder in (("train", train), ("val", val)):
        rows = rows_of(folder, "jpg", "txt")
        kinds = ("jpg", "jpeg", "png", "webp")
        mixed = [{kinds[i % 4]: row["jpg"], "txt": CLASSES[folder.item(i)[1]]} for i, row in enumerate(rows)]
        write_tar(tmp_path / f"{split}.tar", mixed)
    same(opened(tmp_path), [train, val])


def test_fields_may_have_any_name(photos, tmp_path):
    folders = opened(photos)
    for split, folder in zip(("train", "val"), folders, strict=True):
        write_tar(tmp_path / f"{split}.tar", rows_of(folder, "pixels", "kind"))
    with pytest.raises(UsageError, match="for the label; name it with --label-field"):
        opened(tmp_path)
    same(opened(tmp_path, fields=("pixels", "kind")), folders)


def test_class_names_that_repeat_are_refused(photos, tmp_path):
    for split, folder in zip(("train", "val"), opened(photos), strict=True):
        write_tar(tmp_path / f"{split}.tar", rows_of(folder, "jpg", "cls"))
    for names, named in (("crane\ncrane\n", "'crane' is empty or repeated"), ("cat\n\ndog\n", "'' is empty")):
        (tmp_path / "labels.txt").write_text(names)
        with pytest.raises(UsageError, match=named):
            opened(tmp_path)
    with pytest.raises(UsageError, match="are for shards"):
        opened(photos, fields=("jpg", None))


def test_hub_snapshots_and_saved_datasets_of_one_split_each(photos, tmp_path):
    datasets = pytest.importorskip("datasets")
    folders = opened(photos)
    write_hugging_face(
        tmp_path / "both",
        {split: rows_of(folder, "image", "label") for split, folder in zip(("train", "test"), folders, strict=True)},
        CLASSES,
    )
    saved = datasets.load_from_disk(str(tmp_path / "both"))
    for split in saved:
        saved[split].to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
        saved[split].save_to_disk(tmp_path / "each" / split)
    for root in ("hub", "each"):
        found = opened(tmp_path / root)
        assert tuple(found[0].classes) == CLASSES
        same(found, folders)


def test_compressed_shards_are_refused(tmp_path):
    for name in ("train-0.tar.gz", "train.tfrecord.gz", "train-00000-of-00001.gz", "train.tgz"):
        (tmp_path / name).touch()
        with pytest.raises(UsageError, match=f"'{name}' are compressed"):
            opened(tmp_path)
        (tmp_path / name).unlink()


def write_tone(path: Path, samples: int = 16_000) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.sin(np.arange(samples) / 20).astype(np.float32), 16_000)
    return path.read_bytes()


def test_common_voice_and_several_csv_files(tmp_path, monkeypatch):
    for name in "abc":
        write_tone(tmp_path / "clips" / f"{name}.wav")
    (tmp_path / "dev.tsv").write_text("client_id\tpath\tsentence\n1\ta.wav\tSay it\n2\tb.wav\tno\n")
    speech = open_speech(tmp_path / "dev.tsv")
    assert speech.transcripts == ["say it", "no"]
    for name in "ab":
        row = f"clips/{name}.wav,0,say {name}"
        (tmp_path / f"{name}.csv").write_text(f"wav_filename,wav_filesize,transcript\n{row}\n")
    monkeypatch.chdir(tmp_path)
    joined = stored_flags(SpeechConfig(train_data=Path("a.csv,b.csv"), test_data=Path("a.csv")))["train_data"]
    monkeypatch.chdir("/")
    assert open_speech(Path(joined)).transcripts == ["say a", "say b"]


def test_audio_of_several_kinds_and_other_fields(tmp_path):
    rows = [{kind: write_tone(tmp_path / f"x.{kind}"), "txt": "say it"} for kind in ("wav", "flac", "mp3")]
    write_tar(tmp_path / "mixed.tar", rows)
    speech = open_speech(tmp_path / "mixed.tar", max_skipped=0.0)
    assert [speech.load(i) is not None for i in range(3)] == [True] * 3
    write_tar(tmp_path / "other.tar", [{"recording": row["wav"], "spoken": "hi"} for row in rows[:1]])
    named = open_speech(tmp_path / "other.tar", audio_field="recording", text_field="spoken")
    assert named.transcripts == ["hi"]


def test_torch_files_are_read_without_pickle(tmp_path, monkeypatch):
    path, like = tmp_path / "resnet.pth", Variables({"w": np.zeros((2, 3), np.float32)}, {})
    path.touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs torch.*weights_only=True"):
        open_arrays(path, "--init-from").variables(like)

    class Tensor(np.ndarray):
        def float(self):
            return self.astype(np.float32).view(Tensor)

        def numpy(self):
            return np.asarray(self)

    def load(file, *, map_location, weights_only):
        assert weights_only
        return {"epoch": 3, "state_dict": {"module.w": np.ones((2, 3)).view(Tensor)}}

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load, Tensor=Tensor))
    np.testing.assert_array_equal(open_arrays(path, "--init-from").variables(like).params["w"], np.ones((2, 3)))


def test_files_of_the_real_torch_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    weights = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    torch.save({"state_dict": {"module.w": weights}, "epoch": 1}, tmp_path / "resnet.pth")
    like = Variables({"w": np.zeros((2, 3), np.float32)}, {})
    read = open_arrays(tmp_path / "resnet.pth", "--init-from").variables(like).params["w"]
    np.testing.assert_array_equal(read, np.arange(6).reshape(2, 3))


def test_unreadable_files_are_named_and_the_others_read(capsys):
    def read(path: Path) -> str:
        if path.name == "bad":
            raise UnusableFileError("cut off")
        return path.name

    assert each_readable([Path("a"), Path("bad"), Path("b")], read, "--infer") == ({Path("a"): "a", Path("b"): "b"}, 1)
    assert "--infer 'bad': cut off" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--infer 'bad': cut off"):
        each_readable([Path("bad")], read, "--infer")
    with pytest.raises(UnusableFileError, match="'jpg' holds no file"):
        content({"txt": b"x"}, ("jpg",))


def test_flags_of_other_scripts(capsys):
    for given, meant in (("--lr", "--learning-rate"), ("--arch", "--model"), ("--epoch", "--epochs")):
        with pytest.raises(UsageError, match=f"{given}: unknown flag; did you mean {meant}"):
            parse(Config, "imagenet", [given, "1"])
    for words, policy in (("--use_tf_amp True", "mixed_float16"), ("--use_tf_amp False --use_xla 1", "float32")):
        assert parse(Config, "imagenet", words.split()).policy == policy
    with pytest.raises(UsageError, match="--policy float32 and --use_tf_amp 1 disagree"):
        parse(Config, "imagenet", ["--use_tf_amp", "--policy", "float32"])
