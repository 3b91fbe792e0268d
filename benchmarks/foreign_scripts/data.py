"""Tiny data in place of downloads: images of ten classes that a network can learn."""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

# Where JAX's examples look for MNIST before they download it.
JAX_EXAMPLES = pathlib.Path("/tmp/jax_example_data")


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 of shape (count, 28, 28), and labels, uint8 of shape (count,)."""
    templates = np.random.default_rng(0).integers(0, 200, size=(10, 28, 28))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, size=count).astype(np.uint8)
    return (templates[labels] + rng.integers(0, 56, size=(count, 28, 28))).astype(np.uint8), labels


@contextlib.contextmanager
def mnist_of_jax_examples(seed: int) -> Iterator[None]:
    """Data where JAX's examples look for it, unless the real data is there."""
    mark = JAX_EXAMPLES / "generated"
    if JAX_EXAMPLES.exists() and not mark.exists():
        yield
        return
    JAX_EXAMPLES.mkdir(exist_ok=True)
    mark.touch()
    try:
        for name, count in ("train", 512), ("t10k", 128):
            images, labels = digits(count, seed + len(name))
            _write(f"{name}-images-idx3-ubyte.gz", struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
            _write(f"{name}-labels-idx1-ubyte.gz", struct.pack(">II", 2049, count) + labels.tobytes())
        yield
    finally:
        shutil.rmtree(JAX_EXAMPLES)


def _write(name: str, content: bytes) -> None:
    with gzip.open(JAX_EXAMPLES / name, "wb") as file:
        file.write(content)


def learnable(example: Any, rng: np.random.Generator) -> Any:
    """An example of `tfds.testing.mock_data` whose image tells its label, and whose graph's edges join its nodes."""
    if "image" in example:
        image, label = np.asarray(example["image"]), int(example.get("label", rng.integers(10)))
        bits = np.random.default_rng(label).integers(0, 2, size=image.shape)  # the same for every image of a label
        # Without labels: binarized_mnist.
        example["image"] = (bits * 200 + image // 5 if "label" in example else bits).astype(image.dtype)
    if "edge_index" in example:
        nodes, edges = (int(np.ravel(example[name])[0]) % 8 + 3 for name in ("num_nodes", "num_edges"))
        example |= {"num_nodes": np.array([nodes]), "num_edges": np.array([edges])}
        example["edge_index"] = rng.integers(0, nodes, (edges, 2))
        example["node_feat"] = rng.integers(0, 2, (nodes, 9)).astype(np.float32)
        example["edge_feat"] = rng.integers(0, 2, (edges, 3)).astype(np.float32)
        example["labels"] = rng.integers(0, 2, 128).astype(np.float32)
    return example


WORDS = ["the", "cat", "a", "dog", "sees", "house", "and", "sleeps", "in", "under", "tree", "no", "one"]


def write_texts(folder: pathlib.Path, seed: int) -> None:
    """`corpus.txt`, `corpus.csv`, which says whether a line has a cat, and `pos.conllu`, with the parts of speech."""
    rng = np.random.default_rng(seed)
    lines = [[WORDS[i] for i in rng.integers(0, len(WORDS), size=rng.integers(5, 12))] for _ in range(160)]
    (folder / "corpus.txt").write_text("\n".join(map(" ".join, lines)) + "\n")
    table = (f"{' '.join(line)},{int('cat' in line)}\n" for line in lines)
    (folder / "corpus.csv").write_text("sentence,label\n" + "".join(table))
    tags = {word: "NOUN" if word in ("cat", "dog", "house", "tree") else "OTHER" for word in WORDS}
    rows = ("".join(f"{i}\t{w}\t{w}\t{tags[w]}\t_\t_\t0\troot\t_\t_\n" for i, w in enumerate(x, 1)) for x in lines)
    (folder / "pos.conllu").write_text("\n".join(rows) + "\n")


MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = {
    "bert": {"vocab_size": 64, "max_position_embeddings": 64, **MODEL},
    "gpt2": {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
}


def write_models(folder: pathlib.Path) -> None:
    """Configurations of small Transformers, with a tokenizer of whole words each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", *WORDS]
    for kind, config in MODELS.items():
        (folder / kind).mkdir(parents=True)
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        if kind == "bert":
            ends = [("[CLS]", 2), ("[SEP]", 3)]
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
            )
        tokenizer.save(str(folder / kind / "tokenizer.json"))
        special: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "</s>"}
        special["tokenizer_class"] = "PreTrainedTokenizerFast"
        if kind != "bert":
            special["model_input_names"] = ["input_ids", "attention_mask"]
        (folder / kind / "tokenizer_config.json").write_text(json.dumps({**special, "model_max_length": 64}))
        ids = {"pad_token_id": 0, "eos_token_id": 5, "bos_token_id": 5}
        (folder / kind / "flax_model.msgpack").write_bytes(b"\x80")  # a checkpoint without weights: all are new
        (folder / kind / "config.json").write_text(json.dumps({"model_type": kind, **ids, **config}))
