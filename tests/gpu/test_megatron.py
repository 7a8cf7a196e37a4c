"""Megatron with Transformer Engine and NCCL against transformers. Needs one GPU; layouts over two skip with one."""

from __future__ import annotations

import pytest
import torch

from tests.support.jobs import sample_batch
from tests.support.models import write_model
from tests.support.reference import reference, same_bits
from trt_rl.arch import Arch
from trt_rl.layout import Layout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]
SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=130)
DENSE = [Layout(), Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)]
MOE = [Layout(), Layout(ep=2, dp=2), Layout(tp=2, etp=2), Layout(tp=2, ep=2, etp=1), Layout(pp=2)]
CASES = [("dense", x) for x in DENSE] + [("moe", x) for x in MOE]


@pytest.fixture(scope="module")
def ranks():
    from tests.support.ranks import Pool

    pool = Pool(min(2, torch.cuda.device_count()))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(kind):
        if kind not in made:
            extra = {"moe_intermediate_size": 128} if kind == "moe" else {}
            made[kind] = write_model(root / kind, kind, **SIZES, **extra)
        return made[kind]

    return get


def mean_error(found: torch.Tensor, expected: torch.Tensor, batch) -> float:
    return float(((found - expected) * batch.mask_N_S).abs().sum() / batch.mask_N_S.sum())


def need(layout: Layout) -> None:
    if layout.world > torch.cuda.device_count():
        pytest.skip(f"{layout} needs {layout.world} GPUs, {torch.cuda.device_count()} present")


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{k}-{x}" for k, x in CASES])
def test_logprobs_agree_with_transformers(ranks, models, kind, layout):
    import transformers

    need(layout)
    batch = sample_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32).cuda()
    model.eval()
    with torch.no_grad():
        reference = torch.log_softmax(model(batch.tokens_N_S.cuda()).logits, -1).cpu()
    expected = reference.gather(-1, torch.roll(batch.tokens_N_S, -1, 1).unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        narrow = torch.log_softmax(model.bfloat16()(batch.tokens_N_S.cuda()).logits.float(), -1).cpu()
    narrow = narrow.gather(-1, torch.roll(batch.tokens_N_S, -1, 1).unsqueeze(-1)).squeeze(-1)
    rounding = mean_error(narrow, expected, batch)
    for found in ranks.run(layout.world, "tests.support.jobs:logprobs", str(models(kind)), layout):
        print(f"{kind} {layout}: mean error {mean_error(found, expected, batch):.5f}, transformers in BF16 {rounding:.5f}")
        # BF16 on both sides: no further from FP32 than twice what BF16 costs transformers itself.
        assert mean_error(found, expected, batch) <= 2 * rounding


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{k}-{x}" for k, x in CASES])
def test_training_steps_agree_with_one_rank(ranks, models, kind, layout):
    need(layout)
    one = ranks.run(1, "tests.support.jobs:train_steps", str(models(kind)), Layout(), 3, "bf16")[0]
    found = next(h for h in ranks.run(layout.world, "tests.support.jobs:train_steps", str(models(kind)), layout, 3, "bf16") if h[0])
    print(kind, layout, [(round(s["loss"], 5), round(s["grad_norm"], 4), s["ppo_kl"]) for s in found])
    for a, b in zip(one, found, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=0.02)
    assert found[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=0.05)
    assert abs(found[0]["ppo_kl"]) <= (0.0 if kind == "dense" else 1e-3)


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "fp8_per_tensor"])
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{k}-{x}" for k, x in CASES])
def test_buckets_hold_the_bits_that_a_cpu_process_computes(ranks, models, kind, layout, format):
    need(layout)
    expected = reference(models(kind), PrecisionTable.build(Arch.load(models(kind)), PrecisionPolicy(format)))
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    count = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in expected.items()}
    for slices in ranks.run(layout.world, "tests.support.refit_jobs:filled", str(models(kind)), layout, format):
        for name, box, values in slices:
            at = tuple(slice(*side) for side in box)
            found[name][at] = values
            count[name][at] += 1
    assert all((hits == 1).all() for hits in count.values())
    assert not [name for name in expected if not same_bits(found[name], expected[name])]


@pytest.mark.parametrize(("kind", "layout"), [("dense", Layout()), ("moe", Layout(ep=2, dp=2))], ids=["dense", "moe-ep2"])
def test_offload_gives_memory_back_and_changes_no_step(ranks, models, tmp_path, kind, layout):
    need(layout)
    results = ranks.run(layout.world, "tests.support.jobs:offloaded_steps", str(models(kind)), layout, str(tmp_path), "bf16")
    (plain, _), (offloaded, _) = next(h for h, _ in results if h[0][0][0])
    for a, b in zip(plain, offloaded, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-3) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.02)
    for _, ((gradients, _, nothing), (left, host, back)) in results:
        print(f"{kind}: gradients {gradients} bytes, optimizer {host}; given back {back}")
        assert left == 0 and nothing == 0 and back >= 0.99 * (gradients + host)
