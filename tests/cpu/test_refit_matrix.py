"""Whatever the two layouts are, engine ranks hold what quantizing the checkpoint in one process gives, bit for bit.

Trainer ranks are Megatron processes; engine ranks are threads of the same processes; buckets go over gloo. One model is
built for each trainer layout and refits engines of all layouts and formats.
"""

from __future__ import annotations

import pytest

from tests.support.models import write_model
from tests.support.reference import engine_tensors, fingerprint, input_scales, reference
from tests.support.refit_jobs import Case
from tests.support.refits import open_store
from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import violations
from trt_rl.refit.precision import BLOCK, FORMATS, PrecisionPolicy, PrecisionTable

# Engine ranks of TP2 hold whole blocks; KV groups of 64 rows cut blocks on the trainer's side.
WIDE = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
)  # fmt: skip
MODELS = {
    "dense": dict(kind="dense", **WIDE),
    "moe": dict(kind="moe", moe_intermediate_size=256, **WIDE),
    # Smaller than a block in every dimension, and 4 layers: each trainer cut runs through a block.
    "tiny-dense": dict(kind="dense"),
    "tiny-tied": dict(kind="tied"),
    "tiny-moe": dict(kind="moe"),
}
BUCKET = {"dense": 140_000, "moe": 140_000, "tiny-dense": 9_000, "tiny-tied": 9_000, "tiny-moe": 9_000}  # many buckets each
EP2, TP2XEP2 = Layout(ep=2, dp=2), Layout(tp=2, ep=2, etp=1)
TP4XEP2 = Layout(tp=4, ep=2, etp=2)  # experts are cut by a group of their own, smaller than that of attention
LAYOUTS = {
    "dense": [Layout(tp=2, etp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2, etp=2)],
    "moe": [Layout(tp=2, etp=2), Layout(pp=2), EP2, Layout(tp=2, pp=2, etp=2), Layout(pp=2, ep=2, dp=2), TP2XEP2],
    "tiny-dense": [Layout(tp=2, etp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2, etp=2)],
    "tiny-tied": [Layout(tp=2, etp=2), Layout(pp=2)],
    "tiny-moe": [EP2, Layout(tp=2, etp=2), TP2XEP2, Layout(pp=2, ep=2, dp=2), Layout(tp=2, ep=2, dp=2), TP4XEP2],
}
ENGINES = {
    "dense": [EngineLayout(), EngineLayout(tp=2), EngineLayout(replicas=2)],
    "moe": [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=2, ep=2), EngineLayout(replicas=2)],
    "tiny-dense": [EngineLayout(), EngineLayout(replicas=2)],
    "tiny-tied": [EngineLayout(), EngineLayout(replicas=2)],
    "tiny-moe": [EngineLayout(), EngineLayout(replicas=2)],
}


def cases_of(model: str) -> list[Case]:
    cases = [Case(format, engine) for engine in ENGINES[model] for format in FORMATS]
    return [*cases, Case("fp8_block", EngineLayout(replicas=2), nodes=2)]


ALL = [(model, layout, case) for model in MODELS for layout in LAYOUTS[model] for case in cases_of(model)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("matrix"), {}

    def get(model: str):
        if model not in made:
            made[model] = write_model(root / model, spread=0.05, **MODELS[model])
        return made[model]

    return get


@pytest.fixture(scope="module")
def expected(folder):
    made = {}

    def get(model: str, format: str):
        if (model, format) not in made:
            table = PrecisionTable.build(Arch.load(folder(model)), PrecisionPolicy(format))
            made[model, format] = reference(folder(model), table)
        return made[model, format]

    return get


@pytest.fixture(scope="module")
def delivered(ranks, folder):
    """Results of every case by trainer rank; a layout that failed fails each of its cases with the same error."""
    made = {}

    def get(model: str, layout: Layout):
        if (model, layout) not in made:
            store = open_store()
            job = "tests.support.refit_jobs:refit_cases"
            try:
                made[model, layout] = ranks.run(layout.world, job, str(folder(model)), layout, cases_of(model), BUCKET[model], store.port)
            except (AssertionError, TimeoutError) as error:
                made[model, layout] = error
        if isinstance(made[model, layout], BaseException):
            raise made[model, layout]
        return made[model, layout]

    return get


@pytest.mark.parametrize(("model", "layout", "case"), ALL, ids=[f"{m}-{x}-to-{c}" for m, x, c in ALL])
def test_engine_ranks_hold_the_bits_of_a_single_process(delivered, expected, folder, model, layout, case):
    arch, whole = Arch.load(folder(model)), expected(model, case.format)
    results = [of_rank[cases_of(model).index(case)] for of_rank in delivered(model, layout)]
    held = {engine: tensors for result in results for engine, tensors in result.held.items()}
    assert sorted(held) == list(range(case.engine.world))
    for engine, tensors in held.items():
        wanted = {name: fingerprint(t) for name, t in engine_tensors(whole, arch, case.engine, engine).items()}
        assert tensors.keys() == wanted.keys()
        assert not (wrong := [name for name in wanted if tensors[name] != wanted[name]]), f"engine rank {engine}: {wrong}"
    assert len({digest for result in results for digest in result.digests}) == 1
    # Each value leaves the trainer once for each node with an engine; only headers, digests and padding come on top.
    once = sum(t.numel() * t.element_size() for t in whole.values())
    overhead = 1.25 if model.startswith("tiny") else 1.02
    assert case.nodes * once <= sum(result.sent for result in results) < case.nodes * overhead * once


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_wide_models_meet_the_block_rule(folder, model):
    arch = Arch.load(folder(model))
    formats = PrecisionTable.build(arch, PrecisionPolicy("fp8_block")).formats
    assert [violations(arch, engine, formats, BLOCK, fused=True) for engine in ENGINES[model]] == [[]] * len(ENGINES[model])


def test_what_is_compared_tells_tensors_apart(expected, folder):
    """A reference with equal tensors, or with scales that are mostly equal, would hide swaps."""
    for model in MODELS:
        for format in FORMATS:
            tensors = expected(model, format)
            weights = [fingerprint(t) for name, t in tensors.items() if name.endswith("weight")]
            assert len(set(weights)) == len(weights)
            own = ("q_proj.weight_scale", "gate_proj.weight_scale", "o_proj.weight_scale", "down_proj.weight_scale", "_scale_inv")
            scales = [fingerprint(t) for name, t in tensors.items() if name.endswith(own)]
            assert len(set(scales)) >= 0.75 * len(scales)
            assert format == "bf16" or scales
        table = PrecisionTable.build(Arch.load(folder(model)), PrecisionPolicy("fp8_per_tensor"))
        assert len(set(input_scales(table).values())) == len(input_scales(table)) > 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_are_not_finite_are_refused_by_name(ranks, folder, format, value):
    parameter = "decoder.layers.1.self_attention.linear_proj.weight"
    job = "tests.support.refit_jobs:refuse"
    said = ranks.run(2, job, str(folder("tiny-dense")), Layout(tp=2, etp=2), format, parameter, value)
    assert said[0] == (
        "model.layers.1.self_attn.o_proj.weight: the trainer's weight holds NaN or Inf; the refit is refused (trainer rank 0)"
    )
    assert said[1] == ""
