"""Tabular MLP with entity embeddings (Guo & Berkhahn, 2016; the Rossmann model): employment by industry and month."""

from __future__ import annotations

import csv
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, draw
from benchmarks.parity.sources import package_file

STEPS, INDUSTRIES, YEARS = 400, 22, 10


class Tabular(nn.Module):
    @nn.compact
    def __call__(self, industry: jax.Array, year: jax.Array, month: jax.Array, time: jax.Array) -> jax.Array:
        embedded = [nn.Embed(INDUSTRIES, 8)(industry), nn.Embed(YEARS, 4)(year), nn.Embed(12, 4)(month)]
        x = jnp.concatenate([*embedded, time[:, None]], -1)
        for width in (64, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


@functools.cache
def employment() -> tuple[Batch, Batch]:
    """Rows of industry, year, month and log employment; three of ten are held out. The column of changes is left."""
    with package_file("vega_datasets", "_data", "us-employment.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])[1:-1]
    values = np.log([[float(row[name]) for name in columns] for row in rows])
    month, industry = np.meshgrid(np.arange(len(rows)), np.arange(len(columns)), indexing="ij")
    table = {
        "industry": industry.ravel().astype(np.int32),
        "year": (month.ravel() // 12).astype(np.int32),
        "month": (month.ravel() % 12).astype(np.int32),
        "time": (month.ravel() / len(rows) - 0.5).astype(np.float32),
        "target": ((values - values.mean()) / values.std()).ravel().astype(np.float32),
        "unit": np.full(values.size, values.std(), np.float32),
    }
    order = np.random.default_rng(0).permutation(values.size)
    split = len(order) * 7 // 10
    parts = [{name: column[rows] for name, column in table.items()} for rows in (order[:split], order[split:])]
    return parts[0], parts[1]


def predict(models: Models, batch: Batch) -> jax.Array:
    return models(batch["industry"], batch["year"], batch["month"], batch["time"])


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean((predict(models, batch) - batch["target"]) ** 2), {}


def percentage_error(predicted: np.ndarray, test: Batch) -> float:
    """Root mean square percentage error, the metric of the Rossmann competition."""
    log_ratio = (np.asarray(predicted, np.float32) - test["target"]) * test["unit"]
    return 100 * float(np.sqrt(np.mean(np.expm1(log_ratio) ** 2)))


FAMILY = Family(
    name="Rossmann MLP",
    data="US employment by industry (vega_datasets), 30 % of the months held out",
    metric="RMSPE, %",
    larger_is_better=False,
    modules={MODEL: Tabular()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: tuple(batch[name] for name in ("industry", "year", "month", "time"))},
    batch=lambda rng: draw(rng, employment()[0], 128),
    test=lambda: employment()[1],
    predict=predict,
    score=percentage_error,
    optimizer=adam(1e-2, STEPS),
    steps=STEPS,
)
