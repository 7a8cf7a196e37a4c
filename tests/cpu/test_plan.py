"""`trt-rl plan`: exact counts, memory, route, projection, and every violation in one list."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import pytest

from trt_rl.arch import Arch
from trt_rl.config import load_recipe, parse_recipe
from trt_rl.layout import EngineLayout, Layout
from trt_rl.plan import make_plan
from trt_rl.plan import refit as plan_refit
from trt_rl.plan.counts import Counts, engine_bytes, of_stages
from trt_rl.plan.gpus import GPUS
from trt_rl.plan.memory import ASLEEP_GIB, trainer_stages
from trt_rl.plan.seating import Seating
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.forecast import Speeds
from trt_rl.refit.names import parameters
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "examples/shapes"
PUBLISHED = {  # parameters that the published checkpoints hold, tied embeddings once
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def recipe(shape: str = "qwen3-8b", **sections):
    tree = {
        "name": "plan",
        "model": {"path": str(SHAPES / shape)},
        "data": {"train": {"source": "unused.jsonl"}, "max_prompt_tokens": 1024},
        "reward": {"function": "unused:score"},
        "rollout": {"engine": "trtllm", "sampling": {"max_tokens": 3072}},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_recipe(tree)


@pytest.mark.parametrize("shape", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoints(shape):
    assert Counts.of(Arch.load(SHAPES / shape)).total == PUBLISHED[shape]


def test_active_parameters_of_a_mixture():
    assert round(Counts.of(Arch.load(SHAPES / "qwen3-30b-a3b")).active / 1e9, 1) == 3.0
    assert round(Counts.of(Arch.load(SHAPES / "qwen3-235b-a22b")).active / 1e9, 1) == 21.6


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("qwen3-8b", Layout(tp=4, etp=4, pp=2, dp=2)),
        ("qwen3-0.6b", Layout(pp=2)),
        ("qwen3-30b-a3b", Layout(tp=2, ep=4, etp=1, dp=4, pp=2)),
    ],
)
def test_every_rank_of_a_stage_holds_what_the_plan_says(shape, layout):
    """And over ranks that hold different parts, nothing but what Megatron repeats or pads is counted twice."""
    arch = Arch.load(SHAPES / shape)
    stages = of_stages(arch, layout)
    for rank in range(layout.world):
        at = layout.at(rank)
        copy = arch.padded_vocab(layout.tp) // layout.tp * arch.hidden if arch.tied and at.pp == layout.pp - 1 > 0 else 0
        assert sum(map(prod, parameters(arch, layout, at).values())) + copy == stages[at.pp].total
    experts = sum(stage.expert for stage in stages) * layout.ep * layout.etp
    assert experts == Counts.of(arch).experts
    assert sum(stage.dense for stage in stages) * layout.tp >= Counts.of(arch).total - experts


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_engine_ranks_together_hold_the_model(format):
    arch = Arch.load(SHAPES / "qwen3-30b-a3b")
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    one, four = engine_bytes(arch, table, EngineLayout()), engine_bytes(arch, table, EngineLayout(tp=4, ep=4))
    if format == "bf16":
        assert one == 2 * PUBLISHED["qwen3-30b-a3b"]
    else:
        assert 1.0 < one / PUBLISHED["qwen3-30b-a3b"] < 1.03  # what stays BF16, and scales
    assert one < 4 * four < 1.05 * one  # norms, router and KV heads are repeated
    box = wanted("model.layers.0.self_attn.q_proj.weight", (4096, 2048), arch, EngineLayout(tp=4, ep=4), EngineLayout(tp=4, ep=4).at(0))
    assert box == ((0, 1024), (0, 2048))


def test_what_stays_in_memory_is_what_an_h200_measured():
    """Against benchmarks/h200/engine: Megatron before its first update, so without Adam's moments, beside a sleeping vLLM engine."""
    for size, record in (("0.6b", "0.6b_bf16"), ("8b", "8b_bf16")):
        measured = json.loads((ROOT / f"benchmarks/h200/engine/colocated_{record}.json").read_text())["sleep"][0]["asleep_gib"]
        its = recipe(f"qwen3-{size}", rollout={"engine": "vllm", "colocated": True})
        (memory,) = trainer_stages(its, Arch.load(SHAPES / f"qwen3-{size}"), 256 << 20)
        # The allocator keeps what the log-prob pass took: its logits once.
        resident = memory.at_start("bf16") + memory.logits / 2 + ASLEEP_GIB
        assert resident == pytest.approx(measured, rel=0.10), (size, resident, measured)


def test_a_ranks_peak_is_what_an_h200_measured():
    """Against benchmarks/h200/plan: two updates with full micro-batches, NVIDIA's own count of what was taken."""
    records = json.loads((ROOT / "benchmarks/h200/plan/memory.json").read_text())
    assert len(records) == 4
    for name, record in records.items():
        shape, _, cut = name.partition(",")
        arch = Arch.load(SHAPES / shape)
        if "of 48 layers" in cut:
            arch = replace(arch, layers=6, moe_layers=tuple(range(6)))
        its = recipe(shape, trainer={"microbatch_tokens": record["tokens"], "megatron": record["megatron"]})
        (memory,) = trainer_stages(its, arch, 0)
        assert memory.total == pytest.approx(record["measured_gib"]["total"], rel=0.10), (name, memory.total)


def test_memory_by_component():
    plan = make_plan(recipe(trainer={"parallel": {"tp": 2, "dp": 2}, "microbatch_tokens": 8192}))
    trainer, count = plan.memory_gib["trainer"], plan.parameters["trainer_rank_of_stage"][0]["total"]
    assert trainer["weights"] == pytest.approx(count * 2 / 2**30, abs=0.01)
    assert trainer["gradients"] == pytest.approx(count * 4 / 2**30, abs=0.01)
    assert trainer["optimizer"] == pytest.approx(count * 12 / 2 / 2**30, abs=0.01), "sharded over dp"
    parts = [v for k, v in trainer.items() if k not in ("total", "stage")]
    assert trainer["total"] == pytest.approx(sum(parts), abs=0.05)
    engine = plan.memory_gib["engine"]
    assert engine["kv_bytes_per_token"] == 2 * 36 * 8 * 128 * 2
    assert engine["sequences"] == pytest.approx(engine["kv_cache"] * 2**30 / engine["kv_bytes_per_token"] / 4096, abs=1.1)


def stage(**trainer):
    its = recipe(trainer=trainer)
    return trainer_stages(its, Arch.load(SHAPES / "qwen3-8b"), 0)


def test_what_makes_memory_smaller():
    plain = stage(parallel={"tp": 2})[0]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert stage(parallel={"tp": 2}, megatron=full)[0].activations < plain.activations / 5
    some = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
    assert stage(parallel={"tp": 2}, megatron=some)[0].activations < plain.activations
    assert stage(parallel={"tp": 2}, microbatch_tokens=16384)[0].activations == pytest.approx(2 * plain.activations)
    assert stage(parallel={"tp": 2, "dp": 4})[0].optimizer == pytest.approx(plain.optimizer / 4)
    assert stage(parallel={"tp": 4})[0].weights < 0.6 * plain.weights
    assert stage(parallel={"tp": 2, "cp": 2})[0].activations == pytest.approx(plain.activations / 2)
    first, *_, last = stage(parallel={"tp": 2, "pp": 4})
    assert first.logits == 0 < last.logits and first.activations > last.activations, "early stages keep more micro-batches"
    assert stage(parallel={"tp": 2}, logprob_chunk=8192)[0].logits > plain.logits


def test_a_trainer_that_does_not_fit_is_told_what_would():
    plan = make_plan(recipe(cluster={"gpu": "h100"}))
    (text,) = plan.violations
    assert text.startswith("a trainer rank needs about") and "of a GPU's 79.2" in text and "optimizer 91.5" in text
    for part in text.split("works: ")[1].split("; or "):
        key, value = part.split(" = ")
        fixed = load_from(plan, key, value)
        assert not fixed.violations, (part, fixed.violations)


def load_from(plan, key, value):
    (section, *path) = key.split(".")
    assert section == "trainer"
    values: dict = {path[-1]: int(value)}
    return make_plan(recipe(cluster={"gpu": "h100"}, trainer={path[0]: values} if len(path) == 2 else values))


def test_colocated_engine_and_trainer_must_fit_together():
    shared = {"engine": "vllm", "colocated": True, "vllm": {"gpu_memory_utilization": 0.9}}
    (text,) = make_plan(recipe("qwen3-1.7b", rollout=shared, cluster={"gpu": "h100"})).violations
    assert "beside the trainer" in text and "gpu_memory_utilization of at most 0." in text
    most = float(text.rsplit(" ", 1)[1])
    shared["vllm"] = {"gpu_memory_utilization": most}
    fitting = make_plan(recipe("qwen3-1.7b", rollout=shared, cluster={"gpu": "h100"}))
    assert not fitting.violations and fitting.memory_gib["colocated"]["generating"] <= 79.2


def test_offload_makes_room_for_an_engine():
    shared = {"engine": "vllm", "colocated": True, "vllm": {"gpu_memory_utilization": 0.97}}
    (text,) = make_plan(recipe("qwen3-1.7b", rollout=shared, cluster={"gpu": "h100"})).violations
    assert "trainer.offload" not in text, "which would not be enough"
    shared["vllm"] = {"gpu_memory_utilization": 0.9}
    (text,) = make_plan(recipe("qwen3-1.7b", rollout=shared, cluster={"gpu": "h100"})).violations
    assert "set trainer.offload = [gradients, optimizer] (25.6 GiB), or use" in text
    memory = make_plan(recipe("qwen3-1.7b", rollout=shared, cluster={"gpu": "h100"}, trainer={"offload": ["gradients", "optimizer"]}))
    assert memory.violations == []
    together = memory.memory_gib["colocated"]
    assert together["trainer_offloaded"] == pytest.approx(16 * PUBLISHED["qwen3-1.7b"] / 2**30, abs=0.02)
    (text,) = make_plan(recipe("qwen3-1.7b", trainer={"offload": ["gradients"]})).violations
    assert "trainer.offload = ['gradients'] makes room" in text and "set rollout.colocated = true" in text


def test_tensorrt_llm_starts_before_adam_has_its_moments():
    """And takes its share of what is free then, which is too much later."""
    shared = {"engine": "trtllm", "colocated": True}
    (text,) = make_plan(recipe("qwen3-1.7b", rollout=shared)).violations
    assert "beside the trainer" in text and "free_gpu_memory_fraction of at most 0." in text
    shared["trtllm"] = {"kv_cache_config": {"free_gpu_memory_fraction": float(text.rsplit(" ", 1)[1])}}
    assert make_plan(recipe("qwen3-1.7b", rollout=shared)).violations == []


def test_an_engine_without_room_for_a_sequence():
    plan = make_plan(
        recipe("qwen3-235b-a22b", trainer={"parallel": {"tp": 4, "ep": 64, "etp": 1, "dp": 16}}, rollout={"parallel": {"tp": 1}})
    )
    assert any("GiB without any KV cache, and 139.8 are free; raise rollout.parallel.tp" in text for text in plan.violations)


def test_seats():
    layout, engine = Layout(tp=2, etp=2, dp=2), EngineLayout(tp=2, replicas=3)
    seating = Seating.of(layout, engine, 8, False)
    assert seating.trainer == ((0, 0), (0, 1), (0, 2), (0, 3))
    assert seating.engine == ((0, 4), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1)), "a replica goes where it fits"
    assert (seating.nodes, seating.gpus) == (2, 10)
    assert seating.by_node() == [{"trainer": "0-3", "engine": "0-3"}, {"trainer": "", "engine": "4-5"}]
    together = Seating.of(layout, EngineLayout(tp=4), 8, True)
    assert together.engine == together.trainer and together.gpus == 4
    wide = Seating.of(Layout(tp=8, etp=8, pp=2), EngineLayout(tp=16), 8, False)
    assert wide.nodes == 4 and wide.crossing(Layout(tp=8, etp=8, pp=2), EngineLayout(tp=16)) == {"trainer pp": 2, "engine tp": 2}


def test_bytes_of_a_large_model_are_those_of_its_route(monkeypatch):
    """Extrapolated from small models they equal the exact route's, where both can be had."""
    arch = replace(Arch.load(SHAPES / "qwen3-30b-a3b").shrunk(8, 16))
    its = recipe(
        "qwen3-30b-a3b",
        trainer={"parallel": {"ep": 4, "dp": 4}},
        rollout={"engine": "vllm", "parallel": {"tp": 2, "ep": 2}},
        refit={"bucket_mib": 64},
    )
    table = PrecisionTable.build(arch, its.refit.policy())
    seating = Seating.of(its.trainer.parallel.layout(), its.rollout.layout(), 4, False)
    exact = plan_refit.moved(its, arch, table, seating, Speeds())
    monkeypatch.setattr(plan_refit, "_EXACT_BELOW", 0)
    scaled = plan_refit.moved(its, arch, table, seating, Speeds())
    assert exact["exact"] and not scaled["exact"]
    for key in ("bytes_sent_by_trainer", "bytes_inside_nodes", "bytes_between_nodes"):
        assert scaled[key] == pytest.approx(exact[key], rel=0.01), key
    assert scaled["predicted_s"] == pytest.approx(exact["predicted_s"], rel=0.35)


def test_the_projection_follows_its_rates():
    slow = make_plan(recipe()).projection
    assert slow["labelled"].startswith("projection")
    assert slow["step_s"] == pytest.approx(slow["rollout_s"] + slow["train_s"] + slow["refit_s"], abs=0.02)
    from trt_rl.plan.projection import Rates

    fast = make_plan(recipe(), Rates(mfu=0.8)).projection
    assert fast["train_s"] == pytest.approx(slow["train_s"] / 2, rel=0.01) and fast["rollout_s"] == slow["rollout_s"]
    assert make_plan(recipe(), Rates(response_share=1.0)).projection["rollout_s"] > slow["rollout_s"]
    assert {"mfu", "decode", "oversampling", "response_share"} <= slow["assumed"].keys()


def test_every_violation_in_one_list():
    """Those of layout, model, algorithm and cluster alike."""
    broken = recipe(
        trainer={"parallel": {"tp": 3, "pp": 5, "ep": 2}, "mini_batches": 7},
        rollout={"engine": "vllm", "parallel": {"tp": 3, "pp": 2}, "sampling": {"max_tokens": 60000}},
    )
    text = "\n".join(make_plan(broken).violations)
    for part in (
        "trainer.parallel.tp = 3 does not divide the model's 32 attention heads; works: 1, 2, 4, 8",
        "trainer.parallel.pp = 5 does not divide the model's 36 layers",
        "trainer.parallel.ep = 2: a dense model has no experts",
        "trainer.mini_batches = 7 does not divide",
        "rollout.parallel.pp = 2: engines are cut by tp and ep, across nodes too; set pp = 1 and tp = 6",
        "rollout.parallel.tp = 3 does not divide",
        "exceeds the model's max_position_embeddings = 40960",
    ):
        assert part in text, part


def test_cluster_violations():
    many = recipe(trainer={"parallel": {"tp": 8, "dp": 2}}, cluster={"nodes": 2})
    assert "set cluster.nodes = 3" in "\n".join(make_plan(many).violations)
    wide = make_plan(
        recipe(trainer={"parallel": {"tp": 8}}, rollout={"engine": "vllm", "parallel": {"tp": 8}}, cluster={"gpus_per_node": 4})
    )
    assert "keeps a replica on one node, and nodes have 4 GPUs; works: tp of 1, 2, 4" in "\n".join(wide.violations)
    old = make_plan(recipe(trainer={"parallel": {"tp": 8, "dp": 2}}, cluster={"gpu": "a100"}))
    assert "refit.format = fp8_block: cluster.gpu = a100 has no FP8 tensor cores; set bf16" in old.violations
    blocks = make_plan(recipe("qwen3-30b-a3b", rollout={"parallel": {"tp": 4}}, trainer={"parallel": {"ep": 8, "dp": 8}}))
    assert "use moe_ep (rollout.parallel.ep = 4), or TP1/2/3/6" in "\n".join(blocks.violations)


def test_what_an_engine_does_not_take():
    own = recipe("qwen3-0.6b", rollout={"trtllm": {"model_kwargs": {"quantization_config": {}}}})
    assert "rollout.trtllm.model_kwargs.quantization_config is set by trt_rl from refit; remove it" in make_plan(own).violations
    nucleus = {"engine": "sglang", "validation": {"temperature": 1.0, "top_p": 0.7}}
    (text,) = make_plan(recipe("qwen3-0.6b", rollout=nucleus)).violations
    assert text.startswith("rollout.validation: top_p = 0.7 with top_k = 0: SGLang needs a top_k")


def small(engine="vllm", options=None, trainer=None, cluster=None, **sections):
    rollout = {"engine": engine, engine: options or {}} | sections.pop("rollout", {})
    return make_plan(recipe("qwen3-1.7b", rollout=rollout, trainer=trainer or {}, cluster=cluster or {}, **sections))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            lambda: small(refit={"format": "fp8_per_tensor"}),
            "refit.format = fp8_per_tensor: engine 'vllm' holds bf16, fp8_block; use one of",
        ),
        (
            lambda: make_plan(
                recipe(
                    "qwen3-30b-a3b", rollout={"engine": "vllm", "parallel": {"tp": 4, "ep": 2}}, trainer={"parallel": {"ep": 8, "dp": 8}}
                )
            ),
            "rollout.parallel.ep = 2: engine 'vllm' divides experts over all ranks of a replica or over none; works: 1, 4",
        ),
        (
            lambda: small(
                rollout={"colocated": True, "parallel": {"tp": 2}, "replicas": 3},
                options={"distributed_executor_backend": "ray"},
                trainer={"parallel": {"dp": 6}},
                cluster={"gpus_per_node": 3},
            ),
            "rollout.parallel.tp = 2: engine 'vllm' keeps a replica on one node, and nodes have 3 GPUs; works: tp of 1 with",
        ),
        (lambda: small(options={"max_model_len": 512}), "rollout.vllm.max_model_len = 512 is shorter than"),
        (lambda: small("trtllm", {"max_seq_len": 1024}), "use at least 4096"),
        (lambda: small(options={"gpu_memory_utilization": 0.06}), "rollout.vllm.max_model_len = 40960 (the model's, if left out) needs"),
        (lambda: small(options={"gpu_memory_utilization": 0.001}), "less than one sequence of 4096 tokens"),
        (lambda: small(options={"gpu_memory_utilization": "much"}), "rollout.vllm.gpu_memory_utilization = 'much' is not a number"),
        (lambda: small(trainer={"megatron": {"recompute_granularity": "some"}}), "recompute_granularity = 'some'; works: full, selective"),
        (lambda: small(trainer={"megatron": {"recompute_num_layers": 0}}), "recompute_num_layers = 0; use a whole number"),
    ],
)
def test_more_that_a_run_would_find_out_later(plan, text):
    assert text in "\n".join(plan().violations)


def test_null_is_an_engines_own_default():
    for engine, options in (
        ("vllm", {"max_num_seqs": None, "gpu_memory_utilization": None}),
        ("trtllm", {"kv_cache_config": None}),
        ("sglang", {"mem_fraction_static": None, "max_running_requests": None}),
    ):
        assert small(engine, options).memory_gib == small(engine).memory_gib


def test_what_is_suggested_for_sglang_works():
    shared = {"colocated": True}
    (text,) = small("sglang", {"mem_fraction_static": 0.95}, rollout=shared).violations
    assert small("sglang", {"mem_fraction_static": float(text.rsplit(" ", 1)[1])}, rollout=shared).violations == []


def test_a_cache_of_fixed_size():
    assert small("trtllm", {"kv_cache_config": {"max_tokens": 8192}}).memory_gib["engine"]["sequences"] == 2


def test_without_gpus_nothing_is_said_about_them():
    plan = make_plan(recipe(cluster={"gpus_per_node": 0}))
    assert plan.violations == [] and not plan.memory_gib and not plan.projection and plan.refit["bytes_sent_by_trainer"] > 0


@pytest.mark.parametrize("odd", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_mixtures_with_dense_layers(tmp_path, odd):
    config = json.loads((SHAPES / "qwen3-30b-a3b/config.json").read_text()) | odd
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = Arch.load(tmp_path)
    its = recipe(model={"path": str(tmp_path)}, trainer={"parallel": {"ep": 8, "dp": 8, "pp": 2}}, rollout={"engine": "vllm"})
    plan = make_plan(its)
    assert not plan.refit["exact"]
    assert plan.refit["bytes_sent_by_trainer"] == pytest.approx(
        engine_bytes(arch, PrecisionTable.build(arch, its.refit.policy()), EngineLayout()), rel=0.01
    )


def test_what_stays_bf16_costs_twice_the_bytes():
    def sent(**refit) -> int:
        return make_plan(recipe("qwen3-30b-a3b", trainer={"parallel": {"ep": 8, "dp": 8}}, refit=refit)).refit["bytes_sent_by_trainer"]

    assert sent(exclude=["*.mlp.experts.*"]) / sent() == pytest.approx(1.94, abs=0.03)
    assert sent(bf16_first_layers=24) / sent() == pytest.approx(1.48, abs=0.03)


def test_every_gpu_is_known():
    for gpu in GPUS.values():
        assert all(getattr(gpu, field.name) > 0 for field in fields(gpu) if field.name != "fp8_tflops")
    for name in GPUS:
        assert recipe(cluster={"gpu": name}).cluster.gpu == name


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "trt_rl.cli", "plan", "examples/quickstart/recipe.yaml"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"parameters", "memory_gib", "violations", "projection"} <= found.keys() and found["violations"] == []
    assert found["parameters"]["model"]["total"] == 631_040
    broken = subprocess.run([*command, "trainer.parallel.tp=3", "--json"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert broken.returncode == 2 and "does not divide" in json.loads(broken.stdout)["violations"][0]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (
        shown.returncode == 0 and "projected, not measured" in shown.stdout and "nothing found that would stop this recipe" in shown.stdout
    )


def test_a_recipe_overrides_the_cluster():
    its = load_recipe(ROOT / "examples/quickstart/recipe.yaml", ["cluster.gpus_per_node=2", "cluster.gpu=b200"])
    plan = make_plan(its)
    assert plan.cluster["nodes"] == 2 and plan.memory_gib["of_a_gpu"] == GPUS["b200"].memory_gib


def test_names_in_trainer_megatron_are_megatrons():
    import dataclasses

    from megatron.core.transformer import TransformerConfig

    from trt_rl.plan import megatron

    assert megatron.config_fields() == {field.name for field in dataclasses.fields(TransformerConfig)}
    (text,) = make_plan(recipe(trainer={"megatron": {"recompute_granularty": "full"}})).violations
    assert text.endswith("is no field of Megatron-core's TransformerConfig; did you mean 'recompute_granularity'?")


def test_without_megatron_its_names_are_not_checked_and_the_plan_says_so(monkeypatch):
    from trt_rl.plan import megatron

    monkeypatch.setattr(megatron.importlib.util, "find_spec", lambda name: None)
    megatron.config_fields.cache_clear()
    try:
        plan = make_plan(recipe(trainer={"megatron": {"recompute_granularty": "full"}, "parallel": {"tp": 8}}))
    finally:
        megatron.config_fields.cache_clear()
    assert not plan.violations and any("names in trainer.megatron were not checked" in note for note in plan.notes)
