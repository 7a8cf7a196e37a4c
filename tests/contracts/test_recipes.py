"""The recipes in `examples/`: each is planned as it is, and runs two steps with a tiny model of its architecture."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.test_training import finished
from tests.cpu.test_launch import same_as_snapshot
from tests.support.models import write_model
from tests.support.trtllm import environment
from trt_rl.config import load_recipe
from trt_rl.plan import make_plan

ROOT = Path(__file__).parents[2]
RECIPES = {
    "dapo_qwen3_8b_fp8": "qwen3-8b",
    "dapo_qwen3_30b_a3b_fp8": "qwen3-30b-a3b",
    "dapo_qwen3_235b_a22b_fp8": "qwen3-235b-a22b",
    "grpo_qwen3_1p7b_gsm8k": "qwen3-1.7b",
}
SMALLER = [
    "data={train: {source: tests.support.tasks:verl_rows}, validation: {source: tests.support.tasks:verl_rows}, max_prompt_tokens: 64}",
    "reward={function: tests.support.tasks:even_length}",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.sampling.max_tokens=8",
    "trainer.mini_batches=1",
    "trainer.microbatch_tokens=256",
    "refit.bucket_mib=4",
    "run.steps=2",
    "run.validate_every=0",
    "run.save_every=0",
    "run.wait_s=240",
]
DAPO = ["algo.overlong.buffer_tokens=4", "rollout.validation.max_tokens=8", "algo.dynamic_sampling.on_shortfall=train"]
LAYOUTS = {  # what changes besides: fewer replicas and stages' ranks, the same kinds of parallelism
    "dapo_qwen3_8b_fp8": [*DAPO, "rollout.replicas=1", "trainer.parallel.dp=1"],
    "dapo_qwen3_30b_a3b_fp8": [
        *DAPO,
        "rollout.replicas=1",
        "rollout.parallel={tp: 2, ep: 2}",
        "trainer.parallel={tp: 2, ep: 2, etp: 1, dp: 1}",
    ],
    "dapo_qwen3_235b_a22b_fp8": [
        *DAPO,
        "rollout.replicas=1",
        "rollout.parallel={tp: 2, ep: 2}",
        "trainer.parallel={tp: 2, pp: 2, ep: 2, etp: 1, dp: 1}",
    ],
    # vLLM's CPU build cannot sleep: the same code with another engine.
    "grpo_qwen3_1p7b_gsm8k": [
        "trainer.offload=[gradients, optimizer]",
        "rollout.engine=trtllm",
        "data.train.source=tests.support.tasks:gsm8k_rows",
        "data.validation.source=tests.support.tasks:gsm8k_rows",
    ],
}
NODES = {"dapo_qwen3_235b_a22b_fp8": ["5", "1"]}


def test_every_recipe_is_here():
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/recipe.yaml")}
    assert folders == {*RECIPES, "quickstart"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_the_cluster_that_they_name(name):
    recipe = load_recipe(ROOT / f"examples/{name}/recipe.yaml", [f"model.path={ROOT}/examples/shapes/{RECIPES[name]}"])
    plan = make_plan(recipe)
    assert plan.violations == []
    assert plan.cluster["nodes"] == recipe.cluster.nodes and plan.cluster["gpu"] == recipe.cluster.gpu
    if name.startswith("dapo"):
        algo = recipe.algo
        assert (algo.clip_low, algo.clip_high, algo.aggregation) == (0.2, 0.28, "token_mean")
        assert algo.dynamic_sampling.enabled and algo.overlong.enabled and recipe.correct_importance and recipe.refit.format == "fp8_block"
    text = (ROOT / f"examples/{name}/README.md").read_text()
    assert f"{plan.projection['step_s']:.0f} s for" in text, "the README's figures are those of another plan"
    for alternative in re.findall(r"projected at (\d+) s a step: `(.*)`", text):
        overrides = [f"model.path={ROOT}/examples/shapes/{RECIPES[name]}", *shlex.split(alternative[1])]
        other = make_plan(load_recipe(ROOT / f"examples/{name}/recipe.yaml", overrides))
        assert not other.violations and f"{other.projection['step_s']:.0f}" == alternative[0]
    assert f"trt-rl plan examples/{name}/recipe.yaml" in text and "launch/docker_run.sh" in text and "trt-rl launch slurm" in text


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe(name, tmp_path):
    """As its README gives them, up to where the sbatch script is the same for all."""
    arguments = [f"examples/{name}/recipe.yaml", f"model.path=examples/shapes/{RECIPES[name]}"]
    docker = said("bash", "launch/docker_run.sh", "--dry-run", "train", *arguments)
    slurm = said(sys.executable, "-m", "trt_rl.cli", "launch", "slurm", *arguments, "--dry-run")
    script = slurm[: slurm.index("# What this script needs of Slurm")]
    script = re.sub(r"recipe-[0-9a-f]{8}", "recipe-DIGEST", script)  # of everything that a recipe may say
    settings = [line for line in script.splitlines() if line.startswith("#SBATCH") or re.match(r"[a-z_]+=", line)]
    same_as_snapshot(f"{name}.txt", "\n".join([docker.strip(), *settings]) + "\n")


def said(*command: str) -> str:
    """Standard output, with this machine's names taken out."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    user = f"--user {os.getuid()}:{os.getgid()}"
    return (
        done.stdout.replace(user, "--user UID:GID")
        .replace(str(ROOT), "/ROOT")
        .replace(sys.executable.replace(str(ROOT), "/ROOT"), "PYTHON")
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model whose FP8 blocks survive TP2, with the quickstart's tokenizer."""

    def make(kind: str) -> Path:
        sizes = dict(hidden_size=256, intermediate_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=384)
        moe = {"moe_intermediate_size": 128} if kind == "moe" else {}
        folder = write_model(tmp_path_factory.mktemp(kind) / "model", kind, **sizes, **moe)
        for file in (ROOT / "examples/quickstart/model").glob("tokenizer*.json"):
            shutil.copy(file, folder)
        return folder

    return make


LONGER = ("dapo_qwen3_8b_fp8", "dapo_qwen3_30b_a3b_fp8")  # the 235B recipe's path is theirs, over two nodes; CI has 25 minutes


@pytest.mark.trtllm
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else ()) for name in RECIPES])
def test_two_steps(name, tiny, tmp_path):
    kind = {"qwen3-1.7b": "tied", "qwen3-8b": "dense"}.get(RECIPES[name], "moe")
    before = [sys.executable, "-m", "tests.support.two_nodes", *NODES[name], "--"] if name in NODES else []
    train = [*before, sys.executable, "-m", "trt_rl.cli", "train", f"examples/{name}/recipe.yaml", "run.tensorboard=false"]
    command = [*train, f"model.path={tiny(kind)}", *SMALLER, *LAYOUTS[name]]
    summary, steps = finished(command, tmp_path / "run", environment("1.3.0rc15"), mismatch=0.1)  # FP8 moves a random model further
    assert summary["steps"] == summary["weight_version"] == len(steps) == 2 and not summary["engines_lost"]
    assert "tis_mean" in steps[0], "importance is corrected where the engine is FP8"
