"""Megatron against transformers, and every layout against one rank."""

from __future__ import annotations

import pytest
import torch

from tests.support.jobs import sample_batch
from tests.support.models import hf_logits
from trt_rl.layout import Layout

DENSE = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2)]
MOE = [
    Layout(ep=2, dp=2),
    Layout(tp=2, etp=2),
    Layout(pp=2),
    Layout(tp=2, pp=2, etp=2),
    Layout(pp=2, ep=2, dp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, ep=2, dp=2),
    Layout(tp=2, ep=2, etp=2, dp=2),
]
CASES = [("dense", x) for x in DENSE] + [("tied", Layout(tp=2)), ("tied", Layout(pp=2))] + [("moe", x) for x in MOE]
NAMES = [f"{kind}-{layout}" for kind, layout in CASES]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=NAMES)
def test_logits_equal_transformers_and_weights_round_trip(ranks, models, kind, layout):
    folder = models(kind)
    batch = sample_batch()
    expected = hf_logits(folder, batch.tokens_N_S)
    results = ranks.run(layout.world, "tests.support.jobs:logits", str(folder), layout)
    rows = {row: logits for _, by_row, _ in results for row, logits in by_row.items()}
    assert sorted(rows) == list(range(len(batch)))
    for row, logits in rows.items():
        assert (logits - expected[row, : len(logits)]).abs().max() <= 1e-4
    assert [wrong for _, _, wrong in results] == [[]] * layout.world, "HF -> Megatron -> HF changed bits"


@pytest.fixture(scope="module")
def single_rank_losses(ranks, models):
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = ranks.run(1, "tests.support.jobs:train_steps", str(models(kind)), Layout())[0]
        return made[kind]

    return get


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=NAMES)
def test_five_training_steps_do_not_depend_on_the_layout(ranks, models, single_rank_losses, kind, layout):
    expected = single_rank_losses(kind)
    results = ranks.run(layout.world, "tests.support.jobs:train_steps", str(models(kind)), layout)
    found = next(history for history in results if history[0])
    assert len({step["loss"] for step in expected}) == 5, "a loss that does not change proves nothing"
    assert all(step["grad_norm"] > 0.1 for step in expected), "nor does a gradient that is all clipped away"
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
        assert other["entropy"] == pytest.approx(one["entropy"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert found[0]["ppo_kl"] == 0.0
    assert found[0]["clip_fraction"] == 0.0


def test_bf16_first_step_has_zero_ppo_kl(ranks, models):
    """Training and log-prob passes see the same micro-batches, so even BF16 gives equal bits."""
    results = ranks.run(2, "tests.support.jobs:train_steps", str(models("dense")), Layout(tp=2), 2, "bf16")
    history = next(h for h in results if h[0])
    assert history[0]["ppo_kl"] == 0.0
    assert history[1]["ppo_kl"] != 0.0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_checkpoint_restores_weights_and_optimizer(ranks, models, tmp_path, kind):
    layout = Layout(tp=2) if kind == "dense" else Layout(ep=2, dp=2)
    results = ranks.run(2, "tests.support.jobs:checkpoint_steps", str(models(kind)), layout, str(tmp_path))
    straight, restored = next(r for r in results if r[0][0])
    assert restored == straight, "steps after a restore differ from steps without it"


@pytest.mark.parametrize(("kind", "precision"), [("dense", "bf16"), ("moe", "bf16"), ("dense", "fp32")])
def test_offload_changes_no_step_and_its_checkpoints_are_the_same(ranks, models, tmp_path, kind, precision):
    layout = Layout(tp=2) if kind == "dense" else Layout(ep=2, dp=2)
    results = ranks.run(2, "tests.support.jobs:offloaded_steps", str(models(kind)), layout, str(tmp_path), precision)
    (plain, plain_logp), (offloaded, logp) = next(h for h, _ in results if h[0][0][0])
    assert offloaded == plain and plain[1] == plain[2], "a restore gives the step that followed the save"
    assert all(torch.equal(a, b) for a, b in zip(logp, plain_logp, strict=True))
    for _, ((gradients, nothing, _), (left, host, _)) in results:
        assert gradients > 0 and nothing == 0
        assert left == 0, "gradient buffers were kept"
        whole = (3 if precision == "bf16" else 2) * gradients  # FP32 weights and two moments; in FP32 the weights are the trainer's own
        least = whole / 2 if kind == "moe" else 0.98 * whole  # dense parameters of the MoE model have two owners; buffers are padded
        assert least <= host <= 1.001 * whole, (host, whole)


def test_stand_ins_refuse_a_machine_with_cuda(monkeypatch):
    from trt_rl.trainer import cpu

    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.Tensor.type
    with pytest.raises(RuntimeError, match="must not be installed on a machine with CUDA"):
        cpu.install()
    assert torch.Tensor.type is before and not cpu._installed


def test_stand_ins_refuse_to_come_after_megatron():
    import subprocess
    import sys

    code = "import sys, types; sys.modules['megatron'] = types.ModuleType('megatron'); from trt_rl.trainer import cpu; cpu.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "before megatron (or modelopt) is imported" in done.stderr


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_gradient_equal_log_softmax(chunk, temperature):
    from trt_rl.trainer.logprobs import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(33, 40, dtype=torch.float64).float().requires_grad_()
    target, vocab = torch.randint(0, 37, (33,)), 37
    logp, entropy = token_logprobs(logits, target, first_column=0, vocab=vocab, temperature=temperature, chunk=chunk)
    reference_in = logits.detach().clone().requires_grad_()
    reference = torch.log_softmax(reference_in[:, :vocab] / temperature, -1)
    expected = reference.gather(-1, target[:, None])[:, 0]
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(entropy, -(reference.exp() * reference).sum(-1), atol=1e-5)
    weights = torch.randn(33)
    (logp * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(logits.grad, reference_in.grad, atol=1e-6)
    assert (logits.grad[:, vocab:] == 0).all(), "padding columns must not learn"
