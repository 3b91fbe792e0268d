"""Bytes that `with_policy` keeps for the backward pass: `python -m benchmarks.module_residuals`.

The models of `benchmarks.training` with few layers are traced, not run. A layer casts what its matmul reads, and
nothing is cast at the model's entry. The last column is the same model on arguments that are cast to half at its entry,
as Keras and jmp do: it shows what float32 arguments cost.
"""

from __future__ import annotations

import argparse
import dataclasses

import mpjax
from benchmarks.models import WORKLOADS, Workload
from benchmarks.training.configurations import CONFIGURATIONS, loss_function, training
from testing import measures

FORMS = ("float32", "flax_bfloat16", "with_policy_bfloat16")


def cast_at_entry(workload: Workload) -> Workload:
    """The same model, called with half arguments."""
    copy, policy = dataclasses.replace(workload), mpjax.get_policy(CONFIGURATIONS[FORMS[-1]].policy)
    object.__setattr__(copy, "inputs", lambda batch: policy.cast_to_compute(workload.inputs(batch)))
    return copy


def residuals(workload: Workload) -> list[int]:
    """The bytes of each form, and of `with_policy` with casts at the entry."""
    found = []
    for form, model in (*((form, workload) for form in FORMS), (FORMS[-1], cast_at_entry(workload))):
        carry, batch = training(workload, CONFIGURATIONS[form]).abstract()
        loss = loss_function(model, CONFIGURATIONS[form])
        found.append(measures.residual_bytes(loss, carry["params"], carry["state"], batch, has_aux=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--toy", action="store_true", help="tiny models")
    args = parser.parse_args()
    print(f"| MB | {' | '.join(FORMS)} | cast at the entry |\n{'|---' * (len(FORMS) + 2)}|")
    for name in args.only:
        workload = WORKLOADS[name]
        found = residuals(workload.toy() if args.toy else workload.shallow())
        print(f"| {name} | {' | '.join(f'{size / 1e6:.3f}' for size in found)} |", flush=True)


if __name__ == "__main__":
    main()
