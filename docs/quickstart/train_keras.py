"""Handwritten digits with a Keras 3 model and an optax loop, in float16."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpjax

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
tx = mpjax.dynamic_loss_scale(optax.adam(1e-3))


@mpjax.autocast
def loss_fn(trainable, others, images, labels):
    logits, others = model.stateless_call(
        trainable, others, images, training=True
    )
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean(), others


@jax.jit
def train_step(trainable, others, opt_state, images, labels):
    value_and_grad = mpjax.value_and_grad(loss_fn, opt_state, has_aux=True)
    (loss, new_others), grads = value_and_grad(
        trainable, others, images, labels
    )
    trainable, opt_state = mpjax.apply_gradients(
        tx, grads, opt_state, trainable, value=loss
    )
    # batch statistics of a skipped step are not kept
    others = mpjax.keep_if_finite(opt_state, new_others, others)
    return trainable, others, opt_state, loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    opt_state = tx.init(trainable)
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            trainable, others, opt_state, loss = train_step(
                trainable, others, opt_state, images[batch], labels[batch]
            )
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    for variables, values in (
        (model.trainable_variables, trainable),
        (model.non_trainable_variables, others),
    ):
        for variable, value in zip(variables, values, strict=True):
            # the Keras model has the weights again: model.save works
            variable.assign(value)
    accuracy = float(
        jnp.mean(
            model(images[1472:], training=False).argmax(-1) == labels[1472:]
        )
    )
    print(
        f"test accuracy {accuracy:.1%}, "
        f"loss scale {opt_state.loss_scale:.0f}, "
        f"skipped steps {opt_state.skipped_steps}"
    )
    return accuracy


if __name__ == "__main__":
    main()
