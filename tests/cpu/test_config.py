"""Recipes: what is accepted, and that every mistake is one clear error naming what would work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import recipe
from trt_rl import plan
from trt_rl.config import Recipe, dump_recipe, load_recipe, parse_recipe, valid_keys
from trt_rl.errors import ModelError, RecipeError
from trt_rl.layout import Layout
from trt_rl.refit.precision import PrecisionPolicy

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/recipe.yaml"


def test_file_then_overrides_and_back_again():
    loaded = load_recipe(QUICKSTART, ["trainer.parallel.tp=1", "rollout.stop_token_ids=[7,9]", "run.steps=${seed}"])
    assert loaded.trainer.parallel.tp == 1 and loaded.rollout.stop_token_ids == [7, 9] and loaded.run.steps == loaded.seed
    assert loaded.algo.clip_high == 0.28 and loaded.correct_importance
    assert parse_recipe(__import__("yaml").safe_load(dump_recipe(loaded))) == loaded


def test_a_misspelt_key_names_the_nearest_one():
    with pytest.raises(
        RecipeError, match=r"unknown key 'trainer\.paralel\.tp'.*|unknown key 'trainer\.paralel'; did you mean 'trainer\.parallel'"
    ):
        load_recipe(QUICKSTART, ["trainer.paralel.tp=2"])
    with pytest.raises(RecipeError, match=r"unknown key 'rollout\.temperature'; did you mean 'rollout\.sampling\.temperature'"):
        load_recipe(QUICKSTART, ["rollout.temperature=1"])


def test_wrong_values_and_missing_keys_come_together():
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"name": "x", "seed": -1, "model": {"path": "m"}, "data": {}, "reward": {"function": "a:b"}})
    assert "has 2 error(s)" in str(caught.value)
    assert "seed = -1" in str(caught.value) and "data.train: required key is missing" in str(caught.value)


def test_files_and_overrides_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(RecipeError, match=r"bad\.yaml"):
        load_recipe(bad)
    bad.write_text("- a\n- b\n")
    with pytest.raises(RecipeError):
        load_recipe(bad)


def test_the_recipe_stays_small_and_documented():
    leaves = [k for k in valid_keys() if not any(other.startswith(k + ".") for other in valid_keys())]
    assert len(leaves) <= 100
    assert "trainer.parallel.etp" in leaves and len(set(leaves)) == len(leaves)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), r"trainer\.parallel\.tp = 3 does not divide the model's 8 attention heads; works: 1, 2, 4, 8"),
        (Layout(tp=8), r"trainer\.parallel\.tp = 8 does not divide the model's 4 KV heads; works: 1, 2, 4"),
        (Layout(pp=3), r"trainer\.parallel\.pp = 3 does not divide the model's 4 layers"),
        (Layout(ep=3, dp=3), r"trainer\.parallel\.ep = 3 does not divide the model's 4 experts; works: 1, 2, 4"),
        (Layout(ep=2), r"ep\*etp = 2\*1 must divide the 1 ranks .* set dp to a multiple of 2"),
        (Layout(tp=2), r"etp = 1 must equal tp = 2 while ep = 1"),
    ],
)
def test_layouts_that_cannot_work_name_those_that_do(models, layout, message):
    with pytest.raises(RecipeError, match=message):
        plan.check(recipe(models("moe"), layout))


def test_every_violation_is_in_one_error(models):
    broken = recipe(
        models("dense"),
        Layout(tp=3, ep=2, dp=2),
        rollout={"prompts_per_step": 5, "group_size": 2, "sampling": {"top_p": 0.9, "max_tokens": 4000}, "hf": {"dtype": "x"}},
        algo={"overlong": {"enabled": True, "buffer_tokens": 5000}},
        refit={"exclude": ["nothing.*"]},
    )
    broken = broken.model_copy(
        update={"trainer": broken.trainer.model_copy(update={"mini_batches": 3, "megatron": {"bf16": True, "hidden_dropout": 0.1}})}
    )
    with pytest.raises(RecipeError) as caught:
        plan.check(broken)
    for part in (
        "attention heads",
        "a dense model has no experts",
        "mini_batches = 3 does not divide the 10 samples",
        "top_p = 0.9",
        "buffer_tokens = 5000 exceeds",
        "max_position_embeddings = 256",
        "trainer.megatron.bf16 is set by trt_rl from trainer.precision",
        "trainer.megatron.hidden_dropout is set by trt_rl",
        "rollout.hf.dtype is set by trt_rl from refit.format",
        "'nothing.*' matches no tensor",
    ):
        assert part in str(caught.value)


def test_engine_layouts_and_precision_are_checked_before_anything_starts(models):
    for kind, rollout, refit, message in (
        (
            "moe",
            {"parallel": {"tp": 2}},
            {},
            r"rollout\.parallel\.tp = 2: engine 'hf' is one process; set it to 1 and use rollout\.replicas",
        ),
        (
            "moe",
            {"parallel": {"tp": 4, "ep": 3}},
            {},
            r"rollout\.parallel\.ep = 3 does not divide rollout\.parallel\.tp = 4; works: 1, 2, 4",
        ),
        ("dense", {"parallel": {"tp": 2}}, {}, r"num_key_value_heads \* head_dim = 64 is 32 on each engine rank"),
        ("dense", {}, {"exclude": ["*.q_proj"]}, r"refit\.exclude splits self_attn\.q_proj, self_attn\.k_proj"),
    ):
        with pytest.raises(RecipeError, match=message):
            plan.check(recipe(models(kind), Layout(tp=1), rollout=rollout, refit=refit))


def test_the_refit_section_says_what_stays_bf16(models):
    settings = {"format": "fp8_per_tensor", "exclude": ["*.o_proj"], "bf16_first_layers": 1, "bf16_last_layers": 2, "bf16_attention": True}
    policy = recipe(models("dense"), Layout(), refit=settings).refit.policy()
    assert policy == PrecisionPolicy("fp8_per_tensor", ("*.o_proj",), 1, 2, True)
    assert recipe(models("dense"), Layout()).refit.policy() == PrecisionPolicy("fp8_block")


def test_other_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RecipeError, match="model_type is 'llama'; trt_rl trains qwen3 and qwen3_moe"):
        plan.check(recipe(tmp_path, Layout()))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8}')
    with pytest.raises(RecipeError, match="is missing"):
        plan.check(recipe(tmp_path, Layout()))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        from trt_rl.arch import Arch

        Arch.load(tmp_path)
    with pytest.raises(RecipeError, match=r"config\.json does not exist"):
        plan.check(recipe(tmp_path / "absent", Layout()))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # Parameter counts of the published models, in their own config.json sizes.
        (dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
              head_dim=128, vocab_size=151936, tie_word_embeddings=True), 596_049_920),
        (dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
              head_dim=128, vocab_size=151936, tie_word_embeddings=False), 8_190_735_360),
        (dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
              num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=768, norm_topk_prob=True), 30_532_122_624),
    ],
)  # fmt: skip
def test_parameter_counts_of_real_models(shape, expected):
    from trt_rl.arch import Arch

    config = {"model_type": "qwen3", "max_position_embeddings": 40960} | shape
    assert Arch.from_dict(config).parameters() == expected


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "plan",
        "plan.show",
        "arch",
        "layout",
        "refit.names",
        "refit.precision",
        "refit.engine_shards",
        "refit.route",
        "rollout.capabilities",
    ],
)
def test_planning_needs_no_torch(module):
    code = f"import trt_rl.{module}, sys; bad = [m for m in ('torch', 'ray', 'megatron', 'transformers') if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_packages_keep_to_their_processes():
    """rollout/ never imports megatron or the trainer, trainer/ no engine, algo/ no Ray and no other package."""
    forbidden = {
        "rollout": ("megatron", "trt_rl.trainer", "trt_rl.train"),
        "trainer": ("trt_rl.rollout", "vllm", "tensorrt_llm", "sglang"),
        "algo": ("ray", "megatron", "trt_rl.trainer", "trt_rl.rollout", "trt_rl.refit", "trt_rl.config"),
        "refit": ("megatron", "trt_rl.trainer", "trt_rl.rollout"),
        "data": ("ray", "megatron", "trt_rl.trainer", "trt_rl.rollout"),
    }
    import ast

    for package, names in forbidden.items():
        for path in (ROOT / "trt_rl" / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    imported = [node.module or ""]
                for target in imported:
                    assert not any(target == n or target.startswith(n + ".") for n in names), f"{path} imports {target}"


def test_drivers_and_files_stay_readable():
    assert len((ROOT / "trt_rl/train.py").read_text().splitlines()) <= 120
    long = [p for folder in ("trt_rl", "tests") for p in (ROOT / folder).rglob("*.py") if len(p.read_text().splitlines()) > 500]
    assert not long


def test_every_field_of_a_dry_run_is_written(tmp_path):
    command = [sys.executable, "-m", "trt_rl.cli", "train", str(QUICKSTART), f"run.folder={tmp_path}/r", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    resolved = load_recipe(tmp_path / "r" / "resolved.yaml")
    assert isinstance(resolved, Recipe) and resolved.trainer.parallel.tp == 2
    done = subprocess.run([*command, "trainer.parallel.tp=3"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and "tp = 3 does not divide" in done.stdout and "Traceback" not in done.stderr
