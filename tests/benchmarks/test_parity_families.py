"""One seed of each family: half precision starts where float32 starts, runs its matmuls in half, and trains."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import mpjax
from benchmarks.parity import speech, training
from benchmarks.parity.families import FAMILIES, get, module
from benchmarks.parity.family import MODEL, Models
from mpjax import LossScaleState
from testing.measures import half_share
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

POLICY = "mixed_float16"
STEPS = 3  # the learning rate of the first one is 0
# Repeated layers, each of which is tested once: compiling them takes most of the time.
SINGLE_LAYERS = {
    "resnet": {"stages": ((16, 2),)},
    "mobilenet": {"stages": ((24, 2),)},
    "bert": {"layers": 1},
    "gpt": {"layers": 1},
    "unet": {"features": (8,)},
}
# The initial loss scale of these overflows once.
OVERFLOWING = ("jasper",)
# One of each kind: one model, batch statistics, two models, data that the model generates, an overflow.
TRAINED = ("rossmann", "resnet", "gan", "ppo", "jasper")
# NumPy evaluates the training steps of the others; for this one it takes longer than compiling with XLA.
COMPILED = ("ppo",)


@pytest.fixture(scope="module", autouse=True)
def few_voices():
    """Synthesis takes most of the time of two families, and one batch is 24 utterances."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "TRAIN_VOICES", speech.TRAIN_VOICES[:4])
        patch.setattr(speech, "TEST_VOICES", speech.TEST_VOICES[:1])
        yield
    speech.speakers.cache_clear()


def smallest(name):
    """A family whose only model has each of its repeated layers once."""
    family = get(name)
    if name not in SINGLE_LAYERS:
        return family
    (model,) = family.modules.values()
    return dataclasses.replace(family, name=f"small {name}", modules={MODEL: model.copy(**SINGLE_LAYERS[name])})


def initial_state(trained):
    """The initial state of a training, without compiling the initialisation."""
    return arrays_in_numpy(lambda: trained.init(0))()


def float32_losses(family):
    """The sum of a family's losses, evaluated in NumPy."""

    def losses(variables, batch):
        models = Models({name: each.apply for name, each in family.modules.items()}, variables)
        batch = batch if family.prepare is None else family.prepare(models, batch)
        return sum(loss(models, batch)[0] for loss in family.losses.values())

    return in_numpy(losses)


def scale_states(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LossScaleState))
    return [x for x in found if isinstance(x, LossScaleState)]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", FAMILIES)
def test_family_starts_and_trains_in_half(name):
    family = smallest(name)
    trained = training.Training(family, POLICY)
    state = initial_state(trained)
    batch = family.batch(np.random.default_rng(0))
    # WaveGlow's layers of one input are multiplications, whose gradients sum in float32, and its inverse stays exact.
    assert half_share(trained.step, state, batch) >= (0.98 if name == "waveglow" else 0.99)

    variables = state["variables"]
    step, losses = trained.step if name in COMPILED else arrays_in_numpy(trained.step), []
    for _ in range(STEPS + (name in OVERFLOWING) if name in TRAINED else 1):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    # Losses of adversarial models need not fall, nor losses on data that the model generates (a mean over passes).
    if len(family.losses) == 1 and family.prepare is None:
        first = float32_losses(family)(variables, batch)
        assert losses[0] == pytest.approx(first, rel=5e-3, abs=5e-3)
        if name in TRAINED:
            assert losses[-1] < losses[0]
    assert {x.dtype for x in jax.tree.leaves(state["variables"])} == {np.dtype("float32")}
    skipped = [int(s.skipped_steps) for s in scale_states(state)]
    assert skipped == [int(name in OVERFLOWING)] * len(family.losses)


def test_trainings_have_the_direction_of_their_metric():
    for name in ("rossmann", "sentiment"):
        training_made = training.make(name, "float32", 0)
        assert training_made.larger_is_better == (name == "sentiment") == get(name).larger_is_better
        assert training_made.metric_name == get(name).metric


def test_batches_are_those_of_the_seed():
    one, other = (training.Batches(get("rossmann"), seed) for seed in (0, 1))
    first, again, different = (next(iter(each))["target"] for each in (one, one, other))
    np.testing.assert_array_equal(first, again)
    assert (first != different).any()
    assert len(one) == len(list(one))


@pytest.mark.parametrize("policy", training.POLICIES[3:])
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to have float8")
def test_policies_train_a_family(policy):
    family = get("rossmann")
    trained = training.Training(family, policy)
    state = initial_state(trained)
    batch = family.batch(np.random.default_rng(0))
    losses = []
    step = arrays_in_numpy(trained.step)
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state["variables"])}
    assert dtypes == {"float16" if policy == "O2" else "float32"}
    (scale,) = scale_states(state)
    expected = 1.0 if "bfloat16" in policy or policy in ("static 1", training.FLOAT8) else 2.0**15
    assert float(scale.loss_scale) == expected


def test_models_are_plain_float32_modules():
    for name in FAMILIES:
        with open(module(name).__file__, encoding="utf-8") as file:
            source = file.read()
        assert not re.search(r"float16|mpjax|param_dtype|policy=", source), name


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown family 'vgg'; choose from resnet"):
        get("vgg")
    with pytest.raises(ValueError, match="unknown policy 'half'; choose from float32"):
        training.Training(get("rossmann"), "half")


def test_policy_is_read():
    assert training.Training(get("rossmann"), "with_policy mixed_bfloat16").policy == mpjax.get_policy("mixed_bfloat16")
