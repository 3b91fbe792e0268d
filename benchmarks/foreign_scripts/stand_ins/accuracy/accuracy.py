"""The metric `accuracy` of Hugging Face's evaluate, which loads it from a folder of this name, or downloads it."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their references."""

    def _info(self):
        features = datasets.Features({name: datasets.Value("int32") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}
