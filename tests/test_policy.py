"""Policies: the grammar, equality, casts of every kind of leaf, overrides."""

import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax.policy import warn_unused_overrides

NAMES = [
    "mixed_float16",
    "mixed_bfloat16",
    "mixed_float8",
    "float32",
    "bfloat16",
    "float16",
    "O0",
    "O1",
    "O2",
    "O3",
    "half",
    "c=f16",
]


@pytest.mark.parametrize("name", [*NAMES, "p=f32,c=bf16;*/head=>float32;*/norm*=>p=f32,c=f32,o=bf16", "c=f16,r=bf16"])
def test_string_of_a_policy_reads_back(name):
    policy = mpjax.get_policy(name)
    assert mpjax.get_policy(str(policy)) == policy
    assert hash(mpjax.get_policy(str(policy))) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("pattern", [" head", "head ", " ", '"head"', '" head"', '"', "*/a b"])
def test_any_pattern_is_part_of_the_string(pattern):
    policy = mpjax.Policy("float32", "float16", "float32", [(pattern, "float32")])
    assert mpjax.get_policy(str(policy)) == policy
    assert mpjax.get_policy("c=f16; */head => float32").overrides[0][0] == "*/head"


@pytest.mark.parametrize(
    "half", ["float16", jnp.float16, np.dtype("float16"), np.float16, jnp.ones(1, jnp.float16).dtype]
)
def test_spellings_of_a_dtype_make_equal_policies(half):
    assert mpjax.Policy("f32", half, jnp.float32) == mpjax.get_policy("mixed_float16")


def test_grammar_follows_jmp():
    for text in ("p=f32,c=bf16", "c=f16", "params=full,compute=half,output=f32", "f32", "o=f32", "p=f16"):
        theirs, ours = jmp.get_policy(text), mpjax.get_policy(text)
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            assert np.dtype(getattr(theirs, field)) == getattr(ours, field), (text, field)


def test_sums_across_devices_are_float32_by_default():
    for name in NAMES:
        assert mpjax.get_policy(name).reduce_dtype == jnp.float32
    assert mpjax.get_policy("float64").reduce_dtype == jnp.float64
    requested = mpjax.get_policy("p=f32,c=f16,o=f32,r=f16")
    assert requested.reduce_dtype == jnp.float16
    assert str(requested) == "params=float32,compute=float16,output=float32,reduce=float16"
    assert mpjax.Policy("f32", "f16", "f32", reduce_dtype=np.float16) == requested != mpjax.get_policy("mixed_float16")
    assert requested.with_output_dtype("float16").reduce_dtype == jnp.float16
    assert mpjax.get_policy("c=f16,reduce=f32;*/head=>float32") == mpjax.get_policy("c=f16;*/head=>float32")
    with pytest.raises(ValueError, match="reduce_dtype='int8'"):
        mpjax.Policy("f32", "f16", "f32", reduce_dtype="int8")


def test_is_a_jmp_policy_and_reads_one():
    policy = mpjax.get_policy("mixed_bfloat16")
    assert isinstance(policy, jmp.Policy)
    assert mpjax.get_policy(jmp.get_policy("p=f32,c=bf16,o=f32")) == policy


@pytest.mark.parametrize("name", ["float16", "f16", "half", "bfloat16", "bf16"])
def test_a_half_dtype_alone_is_the_mixed_policy(name):
    half = jmp.half_dtype() if name == "half" else jnp.bfloat16 if name.startswith("b") else jnp.float16
    assert mpjax.get_policy(name) == mpjax.Policy("float32", half, "float32")
    x = jnp.full((4, 256), 16.0)
    loss = mpjax.autocast(lambda x, w: jnp.mean((x @ w) ** 2), name)(x, jnp.ones((256, 4)))
    assert loss == 4096.0**2  # squared in float32: float16 ends at 65504


@pytest.mark.parametrize("bad", ["p=f32,x=f16", "p=int8", "p=f32,p=f16", "c=", "mixed_float16;head", "p=f32;c=f16"])
def test_an_error_in_the_grammar_is_quoted_with_the_grammar(bad):
    with pytest.raises(ValueError, match="params=DTYPE,compute=DTYPE") as error:
        mpjax.get_policy(bad)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize(
    ("bad", "nearest"),
    [
        ("fp16", "mixed_float16"),
        ("16-mixed", "mixed_float16"),
        (jnp.float16, "mixed_float16"),
        (np.dtype("float16"), "mixed_float16"),
        (16, "mixed_float16"),
        ("mixed_flaot16", "mixed_float16"),
        ("bf16-mixed", "mixed_bfloat16"),
        ("torch.bfloat16", "mixed_bfloat16"),
        (jnp.bfloat16, "mixed_bfloat16"),
        ("fp8", "mixed_float8"),
        (jnp.float8_e4m3fn, "mixed_float8"),
        ("fp32", "float32"),
        (float, "float32"),
        ("double", "float64"),
        ("o1", "O1"),
        ("O4", "O3"),
        ("Half", "half"),
    ],
)
def test_an_unknown_policy_is_quoted_with_the_nearest_name(bad, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'") as error:
        mpjax.get_policy(bad)
    assert repr(bad) in str(error.value)
    assert "DTYPE" not in str(error.value)


@pytest.mark.parametrize("bad", ["", "amp", "nonsense", "int8", jnp.int32, None, True])
def test_a_policy_like_no_other_is_quoted_with_the_names(bad):
    with pytest.raises(ValueError, match="mixed_float16, mixed_bfloat16") as error:
        mpjax.get_policy(bad)
    assert repr(bad) in str(error.value)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("bad", ["int8", jnp.int32, None, jnp.float8_e4m3fn, complex, 16, "flaot16"])
def test_bad_dtype_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="compute_dtype"):
        mpjax.Policy("float32", bad, "float32")


@pytest.mark.parametrize(
    "bad",
    [(("a;b", "float32"),), (("", "float32"),), ("float32",), (("a", "O2"),), ((1, "float32"),), (("a", "nope"),)],
)
def test_bad_override_is_refused(bad):
    with pytest.raises(ValueError, match=r"override|policy"):
        mpjax.Policy("float32", "float16", "float32", bad)


UNTOUCHED = {
    "int": jnp.arange(3),
    "bool": jnp.array([True]),
    "complex": jnp.ones(2, jnp.complex64),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "int4": jnp.ones(2, jnp.int4),
    "key": jax.random.key(0),
    "raw key": jax.random.PRNGKey(0),
    "python float": 1.5,
    "python int": 3,
    "none": None,
    "text": "x",
    "numpy text": np.array(["x"]),
    "function": jnp.tanh,
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_cast_changes_only_real_floats(name):
    leaf = UNTOUCHED[name]
    assert mpjax.get_policy("O3").cast_to_param({"x": leaf})["x"] is leaf


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_cast_changes_arrays_structs_and_numpy_in_kind(half):
    policy = mpjax.Policy("float32", half, "float32")
    tree = {
        "jax": jnp.ones(2),
        "numpy": np.ones(2),
        "scalar": np.float32(2.0),
        "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    out = policy.cast_to_compute(tree)
    assert {x.dtype for x in out.values()} == {jnp.dtype(half)}
    assert isinstance(out["numpy"], np.ndarray)
    assert isinstance(out["struct"], jax.ShapeDtypeStruct)
    again = policy.cast_to_compute(out)
    assert all(again[k] is out[k] for k in out)


def test_cast_works_under_jit_vmap_and_grad():
    policy = mpjax.get_policy("mixed_float16")
    assert jax.jit(policy.cast_to_compute)(jnp.ones(2)).dtype == jnp.float16
    assert jax.vmap(policy.cast_to_compute)(jnp.ones((2, 3))).dtype == jnp.float16
    gradient = jax.grad(lambda x: policy.cast_to_output(policy.cast_to_compute(x)).sum())(jnp.ones(2))
    assert gradient.dtype == jnp.float32


def test_cast_keeps_sharding_and_shape_of_sharded_struct():
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    policy = mpjax.get_policy("O3")
    assert policy.cast_to_param(jax.device_put(jnp.ones(8), sharding)).sharding.is_equivalent_to(sharding, 1)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert policy.cast_to_param(struct).sharding == sharding


def test_cast_goes_through_flax_boxes_and_nnx_state():
    import flax.linen as nn
    from flax import nnx

    policy = mpjax.get_policy("O3")
    boxed = {"w": nn.Partitioned(jnp.ones(2), names=("x",))}
    out = policy.cast_to_param(boxed)
    assert out["w"].value.dtype == jnp.float16
    assert out["w"].names == ("x",)
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert {x.dtype for x in jax.tree.leaves(policy.cast_to_param(state))} == {jnp.dtype("float16")}


def test_override_covers_nested_paths_and_the_first_match_wins():
    policy = mpjax.Policy(
        "float16", "float16", "float16", [("*/head", "float32"), ("*/head/bias", "p=bf16"), ("*Norm_*", "p=bf16")]
    )
    tree = {"params": {"head": {"bias": jnp.ones(1)}, "BatchNorm_0": {"scale": jnp.ones(1)}, "Dense_0": jnp.ones(1)}}
    out = policy.cast_to_param(tree)["params"]
    assert out["head"]["bias"].dtype == jnp.float32
    assert out["BatchNorm_0"]["scale"].dtype == jnp.bfloat16
    assert out["Dense_0"].dtype == jnp.float16


def test_override_that_matches_nothing_is_reported():
    policy = mpjax.Policy("float16", "float16", "float16", [("*/haed", "float32")])
    with pytest.warns(mpjax.UnusedOverrideWarning, match=r"\*/haed.*head/w"):
        policy.cast_to_param({"head": {"w": jnp.ones(1)}})


def test_o2_keeps_norm_parameters_in_float32():
    params = {"Conv_0": jnp.ones(1), "BatchNorm_0": {"scale": jnp.ones(1)}, "bn1": {"scale": jnp.ones(1)}}
    out = mpjax.get_policy("O2").cast_to_param(params)
    assert out["Conv_0"].dtype == jnp.float16
    assert out["BatchNorm_0"]["scale"].dtype == out["bn1"]["scale"].dtype == jnp.float32


def test_haiku_style_use_of_optax_state_is_castable():
    state = optax.adam(1e-3).init({"w": jnp.ones(2)})
    cast = mpjax.get_policy("O3").cast_to_param(state)
    assert cast[0].mu["w"].dtype == jnp.float16
    assert cast[0].count is state[0].count


def test_an_override_without_a_match_in_a_batch_does_not_warn():
    policy = mpjax.Policy("float32", "float16", "float32", [("*/head", "float32"), ("*/haed", "float32")])
    assert policy.cast_to_compute({"x": jnp.ones(1)})["x"].dtype == jnp.float16
    policy.cast_to_output(jnp.ones(1, jnp.float16))
    # One of the patterns matches: the tree is the model's, and the other is a typo.
    with pytest.warns(mpjax.UnusedOverrideWarning, match=r"\*/haed"):
        policy.cast_to_compute({"head": {"w": jnp.ones(1)}})


@pytest.mark.parametrize(
    "text", ["p=f32,c=bf16,m=f8,o=f32", "params=float32,compute=bfloat16,matmul=float8,output=float32"]
)
def test_the_matmul_dtype_round_trips(text):
    policy = mpjax.get_policy(text)
    assert policy == mpjax.get_policy("mixed_float8") == mpjax.get_policy(str(policy))
    assert policy == mpjax.Policy("float32", "bfloat16", "float32", matmul_dtype=jnp.float8_e4m3fn)
    assert policy != mpjax.get_policy("mixed_bfloat16")
    assert policy.with_output_dtype("bfloat16").matmul_dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("text", "match"), [("c=bf16,m=bf16", "matmul_dtype"), ("c=f16,m=f8", "compute_dtype='bfloat16'")]
)
def test_an_impossible_matmul_dtype_is_an_error(text, match):
    with pytest.raises(ValueError, match=match):
        mpjax.get_policy(text)


def test_the_path_of_the_whole_model_is_not_among_the_paths_of_a_warning():
    policy = mpjax.get_policy("mixed_float16;haed=>float32")
    with pytest.warns(mpjax.UnusedOverrideWarning, match="the paths here are: head, head/bias. Remove"):
        warn_unused_overrides(policy, ["", "head", "head/bias"])
