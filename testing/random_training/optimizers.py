"""Optimizers of random training programs, as source: an inner chain, loss scaling around it, a chain around that."""

from __future__ import annotations

import re
from collections.abc import Iterator

from testing.random_programs.writing import Index

_BASES = (
    "optax.sgd(0.1)",
    "optax.sgd(0.1, momentum=0.9, nesterov=True)",
    "optax.adam(1e-2)",
    "optax.adamw(1e-2, weight_decay=0.1)",
    "optax.amsgrad(1e-2)",
    "optax.rmsprop(1e-2)",
    "optax.lion(1e-2)",
    "optax.lamb(1e-2)",
    "optax.adafactor(1e-2)",
    "optax.adam(optax.cosine_decay_schedule(1e-2, 3))",
    "optax.adabelief(1e-2)",
    "optax.noisy_sgd(0.1, 0.01, 0.55, key=KEY)",
)

# Transformations that may stand anywhere inside loss scaling.
_INNER = (
    "{}",
    "optax.chain(optax.clip_by_global_norm(1.0), {})",
    "optax.chain(optax.clip(0.1), {})",
    "optax.chain(optax.add_decayed_weights(0.1), {})",
    "optax.MultiSteps({}, 2).gradient_transformation()",
    "optax.masked({}, first_only)",
    "optax.multi_transform({{'a': {}, 'b': optax.sgd(0.01)}}, labelled)",
    "optax.inject_hyperparams(lambda rate: optax.chain({}, optax.scale(rate)))(rate=0.5)",
    "optax.apply_if_finite({}, 2)",
    "optax.chain({}, optax.ema(0.9))",
    "mpjax.low_bit_state({}, 'bfloat16', min_size=1)",
    "mpjax.low_bit_state({}, 'int8', min_size=1, block_size=4)",
    "mpjax.low_bit_state({}, 'float8', min_size=1, block_size=4)",
    "optax.contrib.schedule_free({}, 0.1, b1=0.9)",
    "optax.flatten({})",
    "optax.chain(optax.zero_nans(), {})",
    "optax.chain({}, optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1))",
    "optax.conditionally_transform({}, lambda step: step % 2 == 0)",
)
# Around the optimizer, if the params are half.
_HALF_PARAMS = (
    "mpjax.master_weights({}, 'O2')",
    "mpjax.kahan({})",
    "mpjax.stochastic_rounding({})",
)
_SCALES = (
    "mpjax.dynamic_loss_scale({})",
    "mpjax.dynamic_loss_scale({}, growth_interval=2)",
    "mpjax.dynamic_loss_scale({}, growth_interval=1, hysteresis=2, init_scale=2.0**24)",
    "mpjax.dynamic_loss_scale({}, init_scale=2.0**10, backoff_factor=0.25, min_scale=2.0**9)",
    "mpjax.static_loss_scale({}, 2.0**12)",
    "mpjax.static_loss_scale({}, 2.0**-6)",
    "mpjax.loss_scale_for({}, 'mixed_float16')",
    "mpjax.loss_scale_for({}, 'mixed_bfloat16')",
)
# In place of further arguments of loss scaling, which depend on the loop.
OPTIONS = "<options>"
# Around loss scaling: what keeps zero updates at zero, and overflows visible.
_OUTER = (
    "{}",
    "optax.chain(optax.clip_by_global_norm(1.0), {})",
    "optax.chain({}, optax.scale(0.5))",
    "optax.inject_hyperparams(lambda rate: optax.chain({}, optax.scale(rate)))(rate=0.5)",
)


def draw(index: Index, half_params: bool) -> str:
    """An optimizer's source, with `OPTIONS`.

    Args:
        index: Makes each choice.
        half_params: Whether params are half, so that float32 copies or their like are kept.
    """
    text = _BASES[index(len(_BASES))]
    for _ in range(index(3)):
        text = _INNER[index(len(_INNER))].format(text)
    if half_params:
        text = _HALF_PARAMS[index(len(_HALF_PARAMS))].format(text)
    # Nothing may change the updates of half params, which lead to exactly representable values.
    outer = _OUTER[0 if half_params or index(2) else index(len(_OUTER))]
    scale = _SCALES[index(len(_SCALES))]
    return outer.format(scale.format(text)[:-1] + OPTIONS + ")")


def clips_outside(text: str) -> bool:
    """Whether gradients are clipped before loss scaling sees them."""
    return text.startswith(_OUTER[1].partition("{}")[0])


def simpler(text: str) -> Iterator[str]:
    """Optimizers with one transformation less, or a simpler one."""
    for template in (*_OUTER[1:], *_INNER[1:], *_HALF_PARAMS):
        pattern = re.escape(template).replace(re.escape("{}"), "(.*)").replace(r"\{\{", r"\{").replace(r"\}\}", r"\}")
        for match in re.finditer(pattern, text):
            yield text[: match.start()] + match[1] + text[match.end() :]
    for base in _BASES[1:]:
        if base in text:
            yield text.replace(base, _BASES[0])
