"""What stands around a refit: calibration, the FP8 export, the plan's figures, the benchmark, vLLM's parameter map."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs import sample_batch
from tests.support.models import write_model
from tests.support.reference import engine_tensors, reference, same_bits
from trt_rl.arch import Arch
from trt_rl.errors import RecipeError, RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.export import export
from trt_rl.refit.forecast import Speeds, forecast
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import Placement, Route
from trt_rl.rollout.vllm_worker import _refuse_other_layouts, map_parameters

WHOLE_BLOCKS = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=130, num_hidden_layers=2
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose sizes an engine of two ranks can hold in FP8 blocks."""
    root = tmp_path_factory.mktemp("whole_blocks")
    extra = {"moe": {"moe_intermediate_size": 256}}
    return {
        kind: write_model(root / kind, kind, torch.bfloat16, **WHOLE_BLOCKS, **extra.get(kind, {})) for kind in ("dense", "tied", "moe")
    }


def cli(*args: str, timeout: float = 200) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trt_rl.cli", *args], capture_output=True, text=True, timeout=timeout, check=False)


# --- calibration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dense", Layout(tp=2, etp=2)), ("dense", Layout(pp=2)), ("moe", Layout(ep=2, dp=2))],
    ids=["tp2", "pp2", "moe-ep2"],
)
def test_input_scales_are_the_largest_inputs_that_transformers_sees(ranks, models, kind, layout):
    import transformers

    found = ranks.run(layout.world, "tests.support.refit_jobs:calibrated_input_scales", str(models(kind)), layout)
    assert all(scales == found[0] for scales in found), "ranks disagree"
    model = transformers.AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32)
    largest: dict[str, float] = {}

    def watch(name):
        def hook(_, inputs):
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(watch(f"{name}.weight"))
        elif name.endswith("mlp.experts"):
            module.register_forward_pre_hook(watch(name))
    batch = sample_batch()
    with torch.no_grad():
        for row, length in zip(batch.tokens_N_S, batch.lengths_N.tolist(), strict=True):  # without the padding
            model(row[None, :length])
    for name, scale in found[0].items():
        if ".experts." in name and "down_proj" in name:
            assert scale > 0  # inside transformers' fused experts nothing can be watched
            continue
        seen = largest[name.split(".experts.")[0] + ".experts" if ".experts." in name else name]
        assert scale == pytest.approx(seen / 448, rel=1e-4), name


# --- export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_an_export_holds_the_bits_that_a_refit_brings(folders, tmp_path, kind):
    target = tmp_path / "exported"
    done = cli("export", str(folders[kind]), str(target), "--precision", "fp8_block", "--exclude", "model.layers.0.self_attn.*")
    assert done.returncode == 0, done.stdout + done.stderr
    table = PrecisionTable.build(Arch.load(folders[kind]), PrecisionPolicy("fp8_block", ("model.layers.0.self_attn.*",)))
    expected, found = reference(folders[kind], table), load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128] and config["activation_scheme"] == "dynamic"
    assert {"lm_head", "model.layers.0.self_attn.q_proj"} <= set(config["modules_to_not_convert"])
    if kind == "moe":
        assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]  # vLLM quantizes a router that is not listed
    assert json.loads((target / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "FP8_PB_WO"


def test_exports_that_are_refused(folders, tmp_path):
    with pytest.raises(RecipeError, match="exists; export writes a new folder"):
        export(folders["dense"], tmp_path, PrecisionPolicy())
    with pytest.raises(RecipeError, match="needs calibrated activations"):
        export(folders["dense"], tmp_path / "a", PrecisionPolicy("fp8_per_tensor"))
    bad = write_model(tmp_path / "bad", "dense", torch.bfloat16, **WHOLE_BLOCKS)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    from safetensors.torch import save_file

    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the checkpoint holds NaN or Inf"):
        export(bad, tmp_path / "b", PrecisionPolicy())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"], "a refused export left something behind"


# --- plan -------------------------------------------------------------------------------------------------------


def test_the_plan_prints_the_route(tmp_path):
    done = cli("plan", "examples/quickstart/recipe.yaml", "--json", timeout=300)
    assert done.returncode == 0, done.stdout
    refit = json.loads(done.stdout)["refit"]
    assert refit["trainer"] == "TP2" and refit["bytes_sent_by_trainer"] == sum(refit["bytes_by_link"].values())
    assert refit["extra_bytes_of_rank"]["trainer 0"] == 2 * refit["largest_bucket_bytes"]
    assert "(prediction" in cli("plan", "examples/quickstart/recipe.yaml", timeout=300).stdout
    refused = cli("plan", "examples/quickstart/recipe.yaml", "trainer.parallel.tp=3", "rollout.parallel.tp=2", timeout=300)
    assert refused.returncode == 2 and "trainer.parallel.tp = 3" in refused.stdout and "engine 'hf' is one process" in refused.stdout


def test_a_forecast_counts_what_crosses_nodes():
    arch = Arch.from_dict(
        dict(model_type="qwen3", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=128, vocab_size=130, max_position_embeddings=64, tie_word_embeddings=True)
    )  # fmt: skip
    table, layout, engine = PrecisionTable.build(arch, PrecisionPolicy()), Layout(dp=2), EngineLayout(replicas=4)
    placement = Placement((0, 0), (1, 1, 2, 2))
    figures = forecast(Route.build(arch, table, layout, engine, 1 << 20, placement), placement, Speeds(100.0, 10.0))
    one = figures["bytes_into_node"]["1"]
    assert figures["bytes_into_node"] == {"1": one, "2": one}, "each node receives the model once"
    assert figures["bytes_between_nodes"] == 2 * one and figures["bytes_inside_nodes"] == 2 * one
    slower = forecast(Route.build(arch, table, layout, engine, 1 << 20, placement), placement, Speeds(100.0, 5.0))
    assert slower["predicted_s"] > 1.5 * figures["predicted_s"]


# --- benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark_compares_itself_with_the_plain_way(folders, tmp_path):
    recipe = tmp_path / "bench.yaml"
    recipe.write_text(
        f"name: bench\nmodel: {{path: {folders['moe']}}}\ndata: {{train: {{source: unused.jsonl}}}}\nreward: {{function: 'unused:score'}}\n"
        "trainer: {parallel: {ep: 2, dp: 2}}\nrollout: {parallel: {tp: 2, ep: 2}}\nrefit: {bucket_mib: 1}\n"
    )
    record = tmp_path / "record.json"
    done = cli("bench", "refit", "--cpu", "--recipe", str(recipe), "--formats", "fp8_block,bf16", "--repeats", "1", "--json", str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(record.read_text())
    assert result["speedup_vs_baseline"] > 0 and result["bf16_bytes_over_fp8"] > 1.5
    for case in result["results"]:
        assert case["same_weights_as_baseline"], "the plain way gives other weights"
        assert case["refits"][0]["verified_slices"] > 0 and 0 < case["bytes_vs_baseline"] < 1
    assert cli("bench", "refit", timeout=300).returncode == 2


# --- vLLM's parameters ------------------------------------------------------------------------------------------


def vllm_parameters(arch: Arch, table: PrecisionTable, layout: EngineLayout) -> dict[str, torch.Tensor]:
    """Empty parameters under the names and in the shapes that vLLM 0.24 has on one rank, written from its sources."""
    h, d, tp, found = arch.hidden, arch.head_dim, layout.tp, {}
    kv = max(arch.kv_heads // tp, 1)

    def linear(name: str, rows: int, columns: int, format: str, scale: str = "weight_scale_inv") -> None:
        found[f"{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16 if format == "bf16" else torch.float8_e4m3fn)
        if format == "fp8_block":
            found[f"{name}.{scale}"] = torch.zeros(-(-rows // 128), -(-columns // 128))

    found["model.embed_tokens.weight"] = torch.zeros(-(-arch.vocab // 64) * 64 // tp, h, dtype=torch.bfloat16)
    for i in range(arch.layers):
        at = f"model.layers.{i}"
        format = table.formats[f"{at}.self_attn.q_proj.weight"]
        for norm, size in (("input_layernorm", h), ("post_attention_layernorm", h), ("self_attn.q_norm", d), ("self_attn.k_norm", d)):
            found[f"{at}.{norm}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
        linear(f"{at}.self_attn.qkv_proj", (arch.heads // tp + 2 * kv) * d, h, format)
        linear(f"{at}.self_attn.o_proj", h, arch.heads * d // tp, format)
        if i in arch.moe_layers:
            linear(f"{at}.mlp.gate", arch.experts, h, "bf16")
            e, f, p = arch.experts // layout.ep, arch.moe_ffn // layout.moe_tp, f"{at}.mlp.experts.routed_experts."
            kind = torch.bfloat16 if format == "bf16" else torch.float8_e4m3fn
            found[p + "w13_weight"], found[p + "w2_weight"] = torch.zeros(e, 2 * f, h, dtype=kind), torch.zeros(e, h, f, dtype=kind)
            if format == "fp8_block":
                found[p + "w13_weight_scale_inv"] = torch.zeros(e, 2 * (f // 128), h // 128)
                found[p + "w2_weight_scale_inv"] = torch.zeros(e, h // 128, f // 128)
        else:
            linear(f"{at}.mlp.gate_up_proj", 2 * arch.ffn // tp, h, format)
            linear(f"{at}.mlp.down_proj", h, arch.ffn // tp, format)
    found["model.norm.weight"] = torch.zeros(h, dtype=torch.bfloat16)
    if not arch.tied:
        found["lm_head.weight"] = torch.zeros(-(-arch.vocab // 64) * 64 // tp, h, dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize("layout", [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_slices_land_where_vllm_keeps_them(folders, kind, layout, format):
    if layout.ep > 1 and kind != "moe":
        pytest.skip("a dense model has no experts to divide")
    arch = Arch.load(folders[kind])
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    whole = reference(folders[kind], table)
    for rank in range(layout.tp):
        mine, parameters = engine_tensors(whole, arch, layout, rank), vllm_parameters(arch, table, layout)
        landings = map_parameters(parameters, arch, table, layout, rank)
        assert landings.places.keys() == mine.keys()
        for name, tensor in mine.items():
            landings.places[name].view.copy_(tensor)
        at = "model.layers.1."
        qkv = torch.cat([mine[f"{at}self_attn.{m}_proj.weight"].float() for m in "qkv"])
        assert torch.equal(parameters[f"{at}self_attn.qkv_proj.weight"].float(), qkv)
        if kind == "moe":
            first = min(int(n.split(".experts.")[1].split(".")[0]) for n in mine if ".experts." in n)
            for e in range(arch.experts // layout.ep):
                gate_up = [mine[f"{at}mlp.experts.{first + e}.{m}_proj.weight"].float() for m in ("gate", "up")]
                assert torch.equal(parameters[f"{at}mlp.experts.routed_experts.w13_weight"][e].float(), torch.cat(gate_up))
                down = mine[f"{at}mlp.experts.{first + e}.down_proj.weight"].float()
                assert torch.equal(parameters[f"{at}mlp.experts.routed_experts.w2_weight"][e].float(), down)
        elif format == "fp8_block":
            scales = torch.cat([mine[f"{at}mlp.{m}_proj.weight_scale_inv"] for m in ("gate", "up")])
            assert torch.equal(parameters[f"{at}mlp.gate_up_proj.weight_scale_inv"], scales)


def test_a_parameter_that_a_refit_would_not_write_is_named(folders):
    arch = Arch.load(folders["dense"])
    table = PrecisionTable.build(arch, PrecisionPolicy("fp8_block"))
    parameters = vllm_parameters(arch, table, EngineLayout())
    with pytest.raises(RefitError, match=r"model\.surprise\.weight \[3\]: a refit would write 0 of 3 values"):
        map_parameters(parameters | {"model.surprise.weight": torch.zeros(3)}, arch, table, EngineLayout(), 0)
    del parameters["model.layers.0.mlp.down_proj.weight_scale_inv"]
    with pytest.raises(RefitError, match=r"vLLM has no parameter model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"):
        map_parameters(parameters, arch, table, EngineLayout(), 0)


class Method:
    def __init__(self, **kernels) -> None:
        self.__dict__.update(kernels)


class TritonFp8BlockScaledMMKernel:
    pass


class DeepGemmFp8BlockScaledMMKernel:
    pass


def test_kernels_that_rearrange_weights_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(RefitError, match="does not tell which FP8 kernels it runs"):
        _refuse_other_layouts(model, fp8=True)
    _refuse_other_layouts(model, fp8=False)
    model[0].quant_method = Method(fp8_linear=TritonFp8BlockScaledMMKernel())
    _refuse_other_layouts(model, fp8=True)
    model[1].quant_method = Method(fp8_linear=DeepGemmFp8BlockScaledMMKernel())
    with pytest.raises(RefitError, match="vLLM runs 1 with DeepGemmFp8BlockScaledMMKernel, which rearranges or requantizes weights"):
        _refuse_other_layouts(model, fp8=True)
    model[1].quant_method = Method(fp8_backend="FLASHINFER_CUTLASS")
    with pytest.raises(RefitError, match="experts of 1 with FLASHINFER_CUTLASS; start it with moe_backend=triton"):
        _refuse_other_layouts(model, fp8=True)


def test_the_plan_refuses_transports_that_a_run_cannot_use():
    refused = cli("plan", "examples/quickstart/recipe.yaml", "refit.transport=ipc", "refit.delta=true", timeout=300)
    assert refused.returncode == 2
    assert "refit.transport = ipc needs engines on the trainer's GPUs" in refused.stdout
    assert "refit.delta = true works with refit.transport gloo or nccl, not ipc" in refused.stdout.replace("\n", " ")
