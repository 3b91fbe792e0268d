"""Training that starts from weights: of a run in any precision, an export, files with array names, or torchvision."""

from __future__ import annotations

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.run_folder import RunFolder, write_json
from examples.common.training import Variables, float32_params
from examples.common.weights import write_weights
from examples.imagenet import train
from examples.imagenet.models import network, read_pretrained
from examples.imagenet.train import main
from tests.examples.imagenet.runs import as_bytes, digit_flags, digits_task, error_of

pytestmark = pytest.mark.usefixtures("quick_runs")


def saved_run(folder, state, **flags):
    """Makes a run folder with one checkpoint of a state."""
    task = digits_task(**flags)
    with RunFolder.create(folder, folder, task.config.settings()), Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {"epoch": 0, "batch": 0, **task.position()})
    write_json(folder / "data.json", task.description())
    return folder


def trained_state(**flags):
    """A state whose values differ from the initial ones."""
    state = digits_task(**flags).initial_state()
    rng = np.random.default_rng(1)

    def moved(x):
        if not (jnp.issubdtype(x.dtype, jnp.floating) and x.ndim):
            return x
        return jax.device_put((np.asarray(x, np.float32) + rng.normal(size=x.shape) / 10).astype(x.dtype), x.sharding)

    return state._replace(
        params=jax.tree.map(moved, state.params),
        stats=jax.tree.map(moved, state.stats),
        opt_state=state.opt_state._replace(inner_state=jax.tree.map(moved, state.opt_state.inner_state)),
    )


def test_chain_of_precisions_keeps_masters_bitwise(tmp_path):
    state, source = trained_state(policy="O2"), tmp_path / "O2"
    saved_run(source, state, policy="O2")
    masters = as_bytes(float32_params(state))
    for number, policy in enumerate(("float32", "O2", "mixed_bfloat16")):
        task = digits_task(policy=policy, init_from=source)
        state = task.start_state()
        assert int(state.step) == 0
        assert as_bytes(float32_params(state)) == masters
        fresh = task.initial_state()
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
        assert as_bytes(optax.tree.get(state, "trace")) == as_bytes(optax.tree.get(fresh, "trace"))
        source = saved_run(tmp_path / str(number), state, policy=policy)


def test_run_of_another_model_is_refused(tmp_path):
    model = f"{__name__}:CustomLinen"
    source = saved_run(tmp_path / "run", digits_task(model=model).initial_state(), model=model)
    with pytest.raises(UsageError, match="is code: if you trust it, give --model"):
        digits_task(init_from=source).start_state()


def test_training_starts_from_a_run_and_from_files(tmp_path, capsys):
    state = trained_state()
    source = saved_run(tmp_path / "run", state)
    variables = Variables(state.params, state.stats)
    write_weights(tmp_path / "export.safetensors", variables, {})
    for path in (source, tmp_path / "export.safetensors"):
        started = digits_task(policy="O2", init_from=path, ema=0.9).start_state()
        assert as_bytes(float32_params(started)) == as_bytes(state.params)
        assert as_bytes(started.stats) == as_bytes(state.stats)
        assert as_bytes(started.ema["params"]) == as_bytes(state.params)
    assert main(digit_flags(tmp_path / "new", "--init-from", str(source))) == 0
    assert f"weights from {source}" in capsys.readouterr().out
    assert "lacks 'params" in error_of(
        digit_flags(tmp_path / "other", "--init-from", str(save(tmp_path / "no.safetensors", w=np.zeros(3)))), capsys
    )
    assert "can't be read" in error_of(digit_flags(tmp_path / "third", "--init-from", "no/such/file"), capsys)


def save(path, **arrays):
    save_file({name: np.asarray(x, np.float32) for name, x in arrays.items()}, path)
    return path


def torch_resnet(blocks, bottleneck, classes, width=64):
    """Random arrays with the names and shapes of torchvision's ResNets."""
    rng = np.random.default_rng(0)
    arrays = {}

    def conv(name, outputs, inputs, kernel):
        arrays[f"{name}.weight"] = rng.random((outputs, inputs, kernel, kernel), np.float32)

    def norm(name, features):
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            arrays[f"{name}.{leaf}"] = rng.normal(size=features).astype(np.float32)
        arrays[f"{name}.num_batches_tracked"] = np.zeros((), np.int64)

    conv("conv1", width, 3, 7)
    norm("bn1", width)
    inputs = width
    for stage, count in enumerate(blocks):
        features = width * 2**stage
        outputs = features * (4 if bottleneck else 1)
        for index in range(count):
            name = f"layer{stage + 1}.{index}"
            shapes = [(features, inputs, 3), (features, features, 3)]
            if bottleneck:
                shapes = [(features, inputs, 1), (features, features, 3), (outputs, features, 1)]
            for number, (out, into, kernel) in enumerate(shapes, start=1):
                conv(f"{name}.conv{number}", out, into, kernel)
                norm(f"{name}.bn{number}", out)
            if inputs != outputs or (index == 0 and stage > 0):
                conv(f"{name}.downsample.0", outputs, inputs, 1)
                norm(f"{name}.downsample.1", outputs)
            inputs = outputs
    arrays["fc.weight"] = rng.random((classes, inputs), np.float32)
    arrays["fc.bias"] = rng.normal(size=classes).astype(np.float32)
    return arrays


@pytest.mark.parametrize(
    ("name", "blocks", "bottleneck"), [("resnet18", (2, 2, 2, 2), False), ("resnet50", (3, 4, 6, 3), True)]
)
def test_weights_of_torch_are_found_by_name(tmp_path, name, blocks, bottleneck):
    arrays = torch_resnet(blocks, bottleneck, 1000)
    save_file(arrays, tmp_path / "torch.safetensors")
    net = network(name, 1000, 3)
    like = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    read = read_pretrained(tmp_path / "torch.safetensors", like, name)
    params, stats = read
    np.testing.assert_array_equal(params["stem"]["kernel"], arrays["conv1.weight"].transpose(2, 3, 1, 0))
    block = "Bottleneck" if bottleneck else "BasicBlock"
    third = params[f"{block}_{blocks[0]}"]
    np.testing.assert_array_equal(third["Conv_1"]["kernel"], arrays["layer2.0.conv2.weight"].transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(third["shortcut_norm"]["scale"], arrays["layer2.0.downsample.1.weight"])
    last = stats[f"{block}_{sum(blocks) - 1}"]["BatchNorm_1"]["var"]
    np.testing.assert_array_equal(last, arrays[f"layer4.{blocks[3] - 1}.bn2.running_var"])
    np.testing.assert_array_equal(params["Dense_0"]["kernel"], arrays["fc.weight"].T)
    # Every array of the file is used.
    used = sum(x.size for x in jax.tree.leaves(read))
    assert used == sum(x.size for key, x in arrays.items() if "num_batches" not in key)


def test_head_for_other_classes_is_reinitialised(tmp_path, capsys):
    save_file(torch_resnet((2, 2, 2, 2), False, 7, width=64), tmp_path / "torch.safetensors")
    net = network("resnet18", 10, 3)
    like = jax.tree.map(jnp.ones_like, jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3))))
    read = read_pretrained(tmp_path / "torch.safetensors", like, "resnet18")
    np.testing.assert_array_equal(read.params["Dense_0"]["kernel"], 1)
    assert "has 7 classes" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"lacks|does not fit"):
        read_pretrained(
            tmp_path / "torch.safetensors",
            jax.eval_shape(network("resnet34", 7, 3).init, jax.random.key(0), jnp.zeros((1, 64, 64, 3))),
            "resnet34",
        )


# Custom models and other optimizers.


class CustomLinen(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(self.num_classes)(x)


class CustomNNX(nnx.Module):
    def __init__(self, num_classes, channels, *, rngs):
        self.dropout, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(64 * channels, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(x.reshape(len(x), -1)))


class Deterministic(CustomLinen):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        x = nn.Dropout(0.5, deterministic=deterministic)(x.reshape(len(x), -1))
        return nn.Dense(self.num_classes)(x)


class IsTraining(CustomLinen):
    @nn.compact
    def __call__(self, x, *, is_training=False):
        x = nn.Dropout(0.5, deterministic=not is_training)(x.reshape(len(x), -1))
        return nn.Dense(self.num_classes)(x)


class UnknownFlag(CustomLinen):
    @nn.compact
    def __call__(self, x, learn: bool = False):
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


class OtherCollection(CustomLinen):
    @nn.compact
    def __call__(self, x):
        table = self.variable("tables", "shift", jnp.ones, (1,))
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1)) + table.value


class SevenOutputs(CustomLinen):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(x.reshape(len(x), -1))


class MissingField(CustomLinen):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


REFUSED = {
    "UnknownFlag": "its argument 'learn' is not known; the flag for training is one of train, training",
    "OtherCollection": "it has the collections tables; this script keeps params and batch_stats",
    "SevenOutputs": "for 2 images of 10 classes it returns (2, 7), not (2, 10)",
    "MissingField": "it is made as NAME(num_classes=...), but: MissingField.__init__() missing 1 required",
}


def test_the_model_of_the_readme_trains(tmp_path, monkeypatch):
    readme = (pathlib.Path(train.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"### Your own model.*?```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my_models.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(digit_flags(tmp_path / "run", "--model", "my_models:Net", "--epochs", "1")) == 0


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_outside_the_contract_is_refused_in_one_line(model, tmp_path, capsys):
    error = error_of(digit_flags(tmp_path / "run", "--model", f"{__name__}:{model}"), capsys)
    assert REFUSED[model] in error


class Table(nnx.Variable):
    pass


class WithTables(CustomNNX):
    def __init__(self, num_classes, channels, *, rngs):
        super().__init__(num_classes, channels, rngs=rngs)
        self.shift, self.order = Table(jnp.arange(10.0)), Table(jnp.arange(10)[::-1])

    def __call__(self, x):
        return (super().__call__(x) + self.shift[...])[:, self.order[...]]


def test_an_nnx_model_keeps_its_other_variables():
    net = network(f"{__name__}:WithTables", 10, 1)
    images = jnp.ones((2, 8, 8, 1))
    variables = net.init(jax.random.key(0), images)
    zero = variables._replace(params=jax.tree.map(jnp.zeros_like, variables.params))
    scores, stats = net.apply(zero, images, None)
    np.testing.assert_array_equal(scores[0], np.arange(10.0)[::-1])
    assert as_bytes(stats) == as_bytes(variables.stats)
    task = digits_task(model=f"{__name__}:WithTables", ema=0.9)
    state = task.initial_state()
    assert [x.dtype.name for x in jax.tree.leaves(state.ema["stats"])] == ["int32", "float32"]


@pytest.mark.parametrize("model", ["CustomLinen", "CustomNNX", "Deterministic", "IsTraining"])
def test_custom_models_draw_dropout_in_training_only(model):
    task = digits_task(model=f"{__name__}:{model}")
    net = network(task.config.model_name, 10, 1)
    images = jnp.ones((2, 8, 8, 1))
    variables = jax.jit(net.init)(jax.random.key(0), images)
    use = jax.jit(net.apply)
    used = [use(variables, images, None)[0] for _ in range(2)]
    np.testing.assert_array_equal(*used)
    one, two, again = (use(variables, images, jax.random.key(seed))[0] for seed in (1, 2, 1))
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(one, again)


@pytest.mark.parametrize(("optimizer", "policy"), [("adam", "O3"), ("adamw", "O2")])
def test_every_optimizer_updates_half_parameters(optimizer, policy):
    task = digits_task(model=f"{__name__}:CustomLinen", optimizer=optimizer, policy=policy, warmup_epochs=0.0)
    state = task.initial_state()
    floating = [x for x in jax.tree.leaves(state.opt_state.inner_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floating} == {jnp.dtype("float32")}
    before = np.asarray(state.params["Dense_0"]["kernel"])
    batch = next(task.batches(0, 0))
    task.close()
    state, outputs = task.training.train_step(state, batch)
    assert int(outputs["skipped_steps"]) == 0
    assert not np.array_equal(before, state.params["Dense_0"]["kernel"])
