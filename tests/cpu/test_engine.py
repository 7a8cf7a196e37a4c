"""The embedded engine: what it samples, what it reports, and that a refit is a transaction."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time

import pytest
import torch

from tests.support.reference import by_blocks, reference, same_bits
from tests.support.refits import connect, move, raised, refit_engine, together
from trt_rl.arch import Arch
from trt_rl.errors import EngineError, RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.rollout.engine import Request, Sampling, make_engine
from trt_rl.rollout.fp8 import BlockFP8Linear, _mix_experts, dequantize, quantize_activations
from trt_rl.rollout.hf import HFEngine
from trt_rl.rollout.sampling import sample

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def start(models):
    started = []

    def make(kind: str = "dense", format: str = "bf16", load: bool = True, **options) -> HFEngine:
        folder = models(kind)
        arch = Arch.load(folder)
        engine = make_engine("hf", str(folder), arch, PrecisionTable.build(arch, PrecisionPolicy(format)), EngineLayout(), options)
        engine.start()
        started.append(engine)
        if load:
            refit_engine(engine, folder, 0)
        return engine

    yield make
    for engine in started:
        engine.stop()


def run(engine: HFEngine, *requests: Request):
    return [future.result(60) for future in engine.submit(list(requests))]


def request(id: str = "r", prompt=PROMPT, **sampling) -> Request:
    return Request(id, tuple(prompt), Sampling(**({"max_tokens": 12} | sampling)))


def teacher_forced(engine: HFEngine, prompt, tokens, temperature: float) -> list[float]:
    """Log-probs by one full forward pass of the engine's own model, without its cache and scheduler."""
    with torch.inference_mode():
        logits = engine.model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return [logp[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens)]


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_logprobs_are_those_of_a_full_pass_at_the_sampling_temperature(start, kind, format):
    engine = start(kind, format)
    requests = [request(str(i), PROMPT[: 1 + i % 4], temperature=0.7, seed=i) for i in range(8)]
    errors = []
    for asked, done in zip(requests, run(engine, *requests), strict=True):
        expected = teacher_forced(engine, asked.prompt, done.tokens, 0.7)
        errors += [abs(a - b) for a, b in zip(expected, done.logprobs, strict=True)]
        assert done.versions == [0] * len(done.tokens) and done.finish == "length"
    # Batch shapes differ, so BF16 activations (and the FP8 rounding on top of them) differ in their last bit.
    assert sum(errors) / len(errors) <= (0.01 if format == "bf16" else 0.05)


def test_bf16_model_equals_transformers_loading_the_checkpoint(start, models):
    import transformers

    for kind in ("dense", "tied", "moe"):
        engine = start(kind, "bf16")
        reference = transformers.AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.bfloat16)
        for (name, a), (_, b) in zip(engine.model.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.equal(a, b), name


def test_fp8_model_holds_e4m3_and_nothing_wider(start):
    engine = start("moe", "fp8_block")
    held = {name: p.dtype for name, p in engine.model.named_parameters()}
    assert held["model.layers.0.self_attn.q_proj.weight"] is torch.float8_e4m3fn
    assert held["model.layers.1.mlp.experts.gate_up"] is torch.float8_e4m3fn
    assert held["model.embed_tokens.weight"] is torch.bfloat16 and held["model.layers.0.mlp.gate.weight"] is torch.bfloat16


def test_block_fp8_linear_equals_a_product_written_block_by_block():
    torch.manual_seed(0)
    weight, x = torch.randn(200, 300), torch.randn(5, 300).bfloat16()
    values, scales = by_blocks(weight)
    layer = BlockFP8Linear(200, 300)
    layer.weight.data, layer.weight_scale_inv.data = values, scales
    expected = torch.zeros(5, 200)
    for k in range(0, 300, 128):
        part = x[:, k : k + 128].float()
        scale = part.abs().amax(-1, keepdim=True) / 448
        rounded = (part / scale).to(torch.float8_e4m3fn).float()
        for n in range(0, 200, 128):
            product = rounded @ values[n : n + 128, k : k + 128].float().T
            expected[:, n : n + 128] += product * scale * scales[n // 128, k // 128]
    assert torch.allclose(layer(x).float(), expected.bfloat16().float(), rtol=1e-2, atol=1e-2)
    assert (quantize_activations(torch.zeros(2, 130)) == 0).all()
    assert dequantize(values, scales).shape == (200, 300)


# --- sampling ---------------------------------------------------------------------------------------------------


def test_sampled_frequencies_and_truncation():
    torch.manual_seed(0)
    logits, draws = torch.randn(1, 8), random.Random(1)
    for settings in (Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.6), Sampling(temperature=2.0, top_k=5, top_p=0.7)):
        probabilities = torch.softmax(logits[0] / settings.temperature, -1)
        order = probabilities.argsort(descending=True)
        kept = order[: settings.top_k or 8]
        share = probabilities[kept] / probabilities[kept].sum()
        kept = kept[(share.cumsum(0) - share) < settings.top_p]
        expected = torch.zeros(8)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        count = 4000
        tokens, logps = sample(logits.expand(count, -1), [settings] * count, [draws.random() for _ in range(count)])
        for token, logp in set(zip(tokens, logps, strict=True)):
            assert logp == pytest.approx(expected[token].log().item(), abs=1e-4)
        found = torch.bincount(torch.tensor(tokens), minlength=8) / count
        assert (found - expected).abs().max() < 0.04
    tokens, logps = sample(logits, [Sampling(temperature=0.0)], [0.999999])
    assert tokens == [logits.argmax().item()] and logps[0] == pytest.approx(torch.log_softmax(logits, -1).max().item())


def test_extreme_uniform_numbers_stay_inside_the_distribution():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    tokens, _ = sample(logits, [Sampling()] * 2, [0.0, math.nextafter(1.0, 0.0)])
    assert tokens == [0, 2]


def test_seeds_decide_whatever_the_company(start):
    engine = start()
    alone = run(engine, request("a", seed=3))[0]
    crowd = run(engine, *[request(f"b{i}", PROMPT[:2], seed=100 + i) for i in range(5)], request("a", seed=3))[-1]
    other = run(engine, request("c", seed=4))[0]
    assert alone.tokens == crowd.tokens and alone.tokens != other.tokens


def test_stop_tokens_stay_and_end_the_request(start):
    engine = start()
    free = run(engine, request(temperature=0.0))[0]
    stop = free.tokens[4]
    stopped = run(engine, request("s", temperature=0.0, stop_token_ids=(stop,)))[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1] and stopped.finish == "stop"


def test_a_group_prefills_its_prompt_once_and_small_batches_queue(start):
    engine = start(max_batch=3)
    before = engine.stats()
    done = run(engine, *[request(str(i), seed=i) for i in range(8)], request("other", (9, 9, 9)))
    after = engine.stats()
    assert after["prefill_tokens"] - before["prefill_tokens"] == len(PROMPT) + 3
    assert after["prefix_hits"] == 7 and len({tuple(d.tokens) for d in done}) == 9
    one_by_one = start(max_batch=1)
    assert [d.tokens for d in run(one_by_one, *[request(str(i), seed=i) for i in range(8)])] == [d.tokens for d in done[:8]]


def test_bad_requests_are_one_clear_error(start):
    engine = start()
    for bad, message in (
        (request(prompt=()), "the prompt is empty"),
        (request(prompt=(1, 999)), "token id 999 is outside the vocabulary of 130"),
        (request(prompt=(1,) * 250), "prompt of 250 .* exceeds the model's 256 positions"),
        (request(temperature=-1), "temperature = -1"),
        (request(top_p=0.0), "top_p = 0.0"),
        (request(top_k=-1), "top_k = -1"),
        (request(max_tokens=0), "max_tokens = 0"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.submit([bad])
    with pytest.raises(EngineError, match="unknown; engines: trtllm, vllm, sglang, hf"):
        make_engine("nope", "", engine.arch, engine.table, EngineLayout(), {})
    with pytest.raises(EngineError, match=r"rollout\.hf\.max_bach is no option of this engine; its options: max_batch"):
        make_engine("hf", "", engine.arch, engine.table, EngineLayout(), {"max_bach": 1})


# --- control ----------------------------------------------------------------------------------------------------


def long_request(id: str = "long") -> Request:
    return request(id, max_tokens=240)


def wait_until_running(engine: HFEngine) -> None:
    deadline = time.monotonic() + 20
    while not engine._running and time.monotonic() < deadline:
        time.sleep(0.005)


def test_generate_is_a_coroutine_per_request(start):
    engine = start()

    async def both():
        return await asyncio.gather(engine.generate(request("x", seed=1)), engine.generate(request("y", seed=2)))

    x, y = asyncio.run(both())
    assert (x.id, y.id) == ("x", "y") and len(x.tokens) == 12


def test_abort_keeps_what_there_is(start):
    engine = start()
    future = engine.submit([long_request()])[0]
    wait_until_running(engine)
    engine.abort("long")
    done = future.result(20)
    assert done.finish == "abort" and len(done.tokens) == len(done.logprobs) < 240


@pytest.mark.parametrize("mode", ["drain", "abort", "keep"])
def test_pause_modes(start, mode):
    engine = start()
    future = engine.submit([long_request()])[0]
    wait_until_running(engine)
    engine.pause(mode)
    if mode == "keep":
        count = engine.stats()["generated_tokens"]
        time.sleep(0.1)
        assert not future.done() and engine.stats()["generated_tokens"] == count
    else:
        assert future.done() and future.result().finish == ("length" if mode == "drain" else "abort")
    waiting = engine.submit([request("next")])[0]
    time.sleep(0.1)
    assert not waiting.done()
    engine.resume()
    assert len(waiting.result(20).tokens) == 12
    assert future.result(20).finish == ("abort" if mode == "abort" else "length")
    with pytest.raises(EngineError, match="pause mode 'nap' is unknown"):
        engine.pause("nap")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_requests_fail_when_the_engine_stops_or_breaks(start):
    engine = start()
    future = engine.submit([long_request()])[0]
    threading.Thread(target=engine.stop).start()
    with pytest.raises(EngineError, match="stopped"):
        future.result(20)
    broken = start()
    broken.model.lm_head.weight = None
    with pytest.raises(EngineError, match="the engine's thread failed"):
        broken.submit([request()])[0].result(20)
    with pytest.raises(EngineError, match="the engine serves nothing"):
        broken.submit([request()])


# --- refit as a transaction -------------------------------------------------------------------------------------


def test_nothing_is_served_before_the_first_commit_or_after_a_failure(start, models):
    engine = start(load=False)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.submit([request()])
    refit_engine(engine, models("dense"), 0)
    assert run(engine, request())[0].versions[0] == 0

    trainer = connect(engine, models("dense"), scale=0.5)
    move(trainer, engine, 1)
    with pytest.raises(EngineError, match="a refit to version 1 has begun and not committed"):
        engine.submit([request()])
    with pytest.raises(RefitError, match="commit of version 2, but version 1 was received"):
        engine.commit_refit(2)
    engine.commit_refit(1)
    assert engine.health()["version"] == 1 and run(engine, request())[0].versions[0] == 1

    def dies():
        trainer.close()

    trainer.prepare()
    engine.prepare_refit(2)
    error = together(dies, lambda: engine.receive_refit(Refit(2)))[1]
    assert isinstance(error, RefitError) and str(error).startswith("trainer rank 0 stopped sending")
    for _ in range(2):
        with pytest.raises(EngineError, match="a refit failed: trainer rank 0 stopped sending"):
            engine.submit([request()])
        with pytest.raises(RefitError, match="commit of version 2, but version None was received"):
            engine.commit_refit(2)
    engine.disconnect_refit()
    refit_engine(engine, models("dense"), 3)
    assert engine.health() == {"version": 3, "poisoned": None, "alive": True} and run(engine, request())[0].versions[0] == 3


def test_versions_only_grow_and_a_refused_one_changes_nothing(start, models):
    engine = start()
    before = run(engine, request(temperature=0.0))[0]
    trainer = connect(engine, models("dense"), scale=0.5)
    for version in (0, -1):
        with pytest.raises(RefitError, match=f"version {version} is not newer than the engine's 0"):
            engine.prepare_refit(version)
    assert run(engine, request(temperature=0.0))[0].logprobs == before.logprobs
    move(trainer, engine, 5)
    engine.commit_refit(5)
    with pytest.raises(RefitError, match="version 5 is not newer than the engine's 5"):
        engine.prepare_refit(5)
    engine.disconnect_refit()
    with pytest.raises(RefitError, match="has not joined a refit group"):
        engine.prepare_refit(6)


@pytest.mark.parametrize("mode", ["drain", "keep"])
def test_running_requests_forbid_a_refit_and_the_trainer_does_not_wait(start, models, mode):
    engine = start()
    trainer = connect(engine, models("dense"), scale=0.5)
    future = engine.submit([long_request()])[0]
    wait_until_running(engine)
    engine.pause("keep")
    trainer.check()
    trainer.prepare()
    engine.prepare_refit(1)
    if mode == "drain":
        engine.resume()
        engine.pause("drain")
        assert future.result(20).versions == [0] * 240
        raised(together(lambda: trainer.send(Refit(1)), lambda: engine.receive_refit(Refit(1))))
        return
    began = time.monotonic()
    sent, error = together(lambda: trainer.send(Refit(1)), lambda: engine.receive_refit(Refit(1)))
    assert time.monotonic() - began < trainer.agreement.meeting.timeout_s and sent.lost == [1]
    assert isinstance(error, RefitError) and "1 requests are running; pause the engine (drain or abort)" in str(error)


def test_the_prefix_cache_never_serves_an_old_version(start, models):
    engine = start()
    old = run(engine, request(temperature=0.0))[0]
    trainer = connect(engine, models("dense"), scale=0.5)
    move(trainer, engine, 1)
    engine.commit_refit(1)
    before = engine.stats()["prefix_hits"]
    new = run(engine, request(temperature=0.0))[0]
    assert engine.stats()["prefix_hits"] == before
    fresh = start(load=False)
    refit_engine(fresh, models("dense"), 0, scale=0.5)
    assert new.logprobs == run(fresh, request(temperature=0.0))[0].logprobs != old.logprobs


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "fp8_per_tensor"])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_live_tensors_hold_the_bits_of_the_reference(start, models, kind, format):
    engine = start(kind, format)
    expected = reference(models(kind), engine.table)
    assert engine.live.keys() == expected.keys()
    assert not [name for name in expected if not same_bits(engine.live[name], expected[name])]
    addresses = {name: view.data_ptr() for name, view in engine.live.items()}
    refit_engine(engine, models(kind), 1, scale=0.5)
    expected = reference(models(kind), engine.table, scale=0.5)
    assert not [name for name in expected if not same_bits(engine.live[name], expected[name])]
    assert addresses == {name: view.data_ptr() for name, view in engine.live.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_mixed_in_bf16_whatever_the_routers_weights_are(dtype):
    """transformers 5.5, which TensorRT-LLM 1.3.0rc15's image brings, hands them over in FP32; 5.17 in BF16."""
    x_T_H = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    expert_T_K, weight_T_K = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0.5, 0.25], [1.0, 0.5]], dtype=dtype)
    mixed = _mix_experts(x_T_H, expert_T_K, weight_T_K, lambda expert, token: x_T_H[token] * (expert + 1))
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, torch.tensor([[1.0, 2.0], [10.5, 14.0]], dtype=torch.bfloat16))
