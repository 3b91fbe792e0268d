"""The models of tests and benchmarks: small programs of every kind, models at published sizes, and random ones.

`zoo` holds float32 training programs that autocast must accept unchanged, `published` the models of
`benchmarks.training`, and `random_flax` writes Flax models. A family of `benchmarks.parity` is a task with its data.
"""
