"""The SGLang adapter keeps the promises of every engine, against a stand-in for SGLang 0.5.16 (`sglang_fake`), and its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import modelopt.torch.quantization.qtensor  # noqa: F401  now: a trainer that imports it while it sends is late
import pytest
import torch

from tests.contracts import test_engine_contract as promises
from tests.contracts.test_engine_contract import PROMPT, Background, request, run
from tests.support.models import hf_logits, write_model
from tests.support.reference import reference
from tests.support.refits import ONE_ENGINE, connect, megatron_parameters, move, open_store, refit_engine, together
from trt_rl.arch import Arch
from trt_rl.config import OWNED_ENGINE
from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.member import Agreement, TrainerMember
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.link import Meeting
from trt_rl.rollout.engine import Request, Sampling, make_engine
from trt_rl.rollout.sglang import SglangEngine
from trt_rl.rollout.sglang_worker import LOADER, map_parameters, refuse_other_layouts

FAKE = str(Path(__file__).parent / "sglang_fake")
sys.path.insert(0, FAKE)
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=200, num_hidden_layers=2)  # fmt: skip

globals().update({name: value for name, value in vars(promises).items() if name.startswith("test_")})  # with the engine below


def made(folder, format: str = "bf16", layout: EngineLayout = ONE_ENGINE, exclude: tuple[str, ...] = (), **options) -> SglangEngine:
    arch = Arch.load(folder)
    return make_engine("sglang", str(folder), arch, PrecisionTable.build(arch, PrecisionPolicy(format, exclude)), layout, options)


def weights_of(engine: SglangEngine) -> dict[str, str]:
    """SGLang's own checksums of its live parameters."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    success, _, payload, _ = engine._wait(engine._manager.check_weights(CheckWeightsReqInput(action="checksum"), None))
    assert success
    return payload[0]["checksums"]


@pytest.fixture(scope="module")
def engine(folder):
    """The engine of all promises: it serves version 0 of the checkpoint in BF16, and can sleep."""
    started = made(folder, sleep=True, max_running_requests=128)
    started.start()
    refit_engine(started, folder, 0)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang")
    extra = {"moe": dict(moe_intermediate_size=256)}
    return {kind: write_model(root / kind, kind, torch.bfloat16, **SIZES, **extra.get(kind, {})) for kind in ("dense", "tied", "moe")}


@pytest.fixture(scope="module")
def small(folders):
    """A dense model in FP8, with room for 64 tokens and many EOS tokens; the last test that uses it ends its process."""
    config = json.dumps({"eos_token_id": list(range(150))})
    started = made(folders["dense"], "fp8_block", max_total_tokens=64, json_model_override_args=config)
    started.start()
    refit_engine(started, folders["dense"], 0)
    yield started
    started.stop()


# --- sampling and requests ---------------------------------------------------------------------------------------------


def test_an_end_of_sequence_token_of_the_checkpoint_does_not_stop_a_request(small):
    """SGLang reads stop tokens only where it also stops at EOS (any below 150 in this model), so the adapter goes on after it."""
    settings = dict(temperature=0.0, max_tokens=12)
    (free,) = run(small, request("free", PROMPT[:9], **settings))
    inner, before = [t for t in free.tokens[:-1] if t < 150], small.stats()["continued"]
    never = next(t for t in range(150, 200) if t not in free.tokens)
    (whole,) = run(small, request("whole", PROMPT[:9], stop_token_ids=(never,), **settings))
    assert whole.tokens == free.tokens and whole.finish == "length" and len(whole.logprobs) == 12
    assert small.stats()["continued"] - before == len(inner) > 0
    (part,) = run(small, request("part", PROMPT[:9], stop_token_ids=(free.tokens[6],), **settings))
    assert part.tokens == free.tokens[: free.tokens.index(free.tokens[6]) + 1] and part.finish == "stop"


def test_a_stop_token_in_the_last_place_counts_as_stop(engine):
    (free,) = run(engine, request("free2", temperature=0.0, max_tokens=3))
    (done,) = run(engine, request("last", temperature=0.0, max_tokens=3, stop_token_ids=(free.tokens[2],)))
    assert done.finish == "stop"


def test_logprobs_of_truncated_sampling_are_renormalized(engine, folder):
    settings = dict(temperature=0.8, top_k=5, top_p=0.9, max_tokens=10)
    asked = [request(f"cut-{i}", PROMPT[: 6 + i], seed=i, **settings) for i in range(4)]
    for one, done in zip(asked, run(engine, *asked), strict=True):
        row = hf_logits(folder, torch.tensor([[*one.prompt, *done.tokens]]))[0].float()[len(one.prompt) - 1 : -1] / 0.8
        p = row.softmax(-1)
        largest = p.sort(descending=True).values[:, :5]
        assert (largest[:, :4].sum(-1) < 0.9).all(), "top_p cuts too: make the test's distribution flatter"
        for i, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
            assert p[i, token] >= 0.95 * largest[i, 4]  # BF16 may swap neighbours
            assert logprob == pytest.approx((p[i, token] / largest[i].sum()).log().item(), abs=0.08)
    with pytest.raises(EngineError, match=r"request nucleus: top_p = 0\.9 with top_k = 0: SGLang tells log-probs .* set top_k too"):
        run(engine, request("nucleus", top_p=0.9))


def test_a_request_may_use_all_positions(engine):
    (done,) = run(engine, request("full", tuple(range(3, 503)), max_tokens=12))
    assert len(done.tokens) == 12 and done.finish == "length"
    (one,) = run(engine, request("longest", tuple(i % 500 for i in range(511)), max_tokens=1))
    assert len(one.tokens) == 1


def test_an_abort_reaches_one_request_and_not_those_whose_id_begins_alike(engine):
    background = Background(engine, request("a", max_tokens=400), request("ab", PROMPT[:9], max_tokens=60))
    time.sleep(0.5)
    engine.abort("a")
    first, second = background.finish()
    assert first.finish == "abort" and len(second.tokens) == 60 and second.finish == "length"


def test_a_pause_that_aborts_keeps_what_there_is(engine):
    background = Background(engine, *[request(f"p{i}", max_tokens=450) for i in range(4)])
    time.sleep(0.7)
    engine.pause("abort")
    done = background.finish()
    assert {d.finish for d in done} == {"abort"} and all(len(d.tokens) == len(d.logprobs) == len(d.versions) for d in done)
    held = Background(engine, request("held-1"), request("held-2"))
    time.sleep(0.2)
    engine.abort("held-1")  # while it waits for the engine
    engine.resume()
    first, second = held.finish()
    assert (first.finish, first.tokens) == ("abort", []) and len(second.tokens) == 8
    with pytest.raises(EngineError, match="pause mode 'keep' is unknown to SGLang; modes: drain, abort"):
        engine.pause("keep")


# --- memory ------------------------------------------------------------------------------------------------------------


def test_a_sleep_loses_weights_and_a_refit_brings_them_back(engine, folder):
    (before,) = run(engine, request("awake", temperature=0.0))
    background = Background(engine, request("up", max_tokens=400))
    time.sleep(0.3)
    with pytest.raises(EngineError, match="1 requests are running; pause the engine"):
        engine.sleep()
    engine.abort("up")
    background.finish()
    engine.sleep()
    engine.sleep()  # asleep already
    assert engine.health()["asleep"] == ["kv_cache", "weights"]
    with pytest.raises(EngineError, match="serves nothing: it slept and lost its weights"):
        run(engine, request("asleep"))
    version = engine.health()["version"] + 1
    trainer = connect(engine, folder)
    with pytest.raises(RefitError, match=r"weights sleep; wake\('weights'\) comes before a refit"):
        engine.prepare_refit(version)
    engine.wake("weights")
    move(trainer, engine, version)
    engine.commit_refit(version)
    with pytest.raises(EngineError, match="it sleeps: kv_cache"):
        run(engine, request("half"))
    engine.wake("kv_cache")
    engine.wake("kv_cache")
    engine.disconnect_refit()
    trainer.close()
    (after,) = run(engine, request("again", temperature=0.0))
    assert after.tokens == before.tokens and set(after.versions) == {version}
    with pytest.raises(EngineError, match=r"cannot wake 'graphs'; it knows kv_cache, weights"):
        engine.wake("graphs")


# --- refit -------------------------------------------------------------------------------------------------------------


def check_fp8(engine: SglangEngine, folder) -> None:
    """Two refits into a started engine: verified, the same bits again, and the tokens that the embedded engine makes of them."""
    trainer = connect(engine, folder)
    sums = []
    for version in (1, 2):
        trainer.check()
        trainer.prepare()
        engine.prepare_refit(version)
        _, (report,) = together(lambda v=version: trainer.send(Refit(v)), lambda v=version: engine.receive_refit(Refit(v)))
        assert report["verified"] > 0 and report["version"] == version
        engine.commit_refit(version)
        sums.append(weights_of(engine))
    engine.disconnect_refit()
    trainer.close()
    assert sums[0] == sums[1]
    (done,) = run(engine, Request("greedy", PROMPT[:20], Sampling(temperature=0.0, max_tokens=6)))
    assert done.tokens == made_by_hf(folder, engine.table, PROMPT[:20])


def test_fp8_blocks_of_a_dense_model_arrive_and_generate(small, folders):
    check_fp8(small, folders["dense"])


def test_fp8_blocks_of_experts_arrive_and_generate(folders):
    engine = made(folders["moe"], "fp8_block", exclude=("model.layers.0.mlp.experts.*", "model.layers.1.self_attn.*"))
    engine.start()
    try:
        check_fp8(engine, folders["moe"])
    finally:
        engine.stop()


def made_by_hf(folder, table, prompt) -> list[int]:
    """What the embedded engine generates from the same bits."""
    other = make_engine("hf", str(folder), Arch.load(folder), table, EngineLayout(), {})
    other.start()
    try:
        refit_engine(other, folder, 0)
        (done,) = run(other, Request("greedy", prompt, Sampling(temperature=0.0, max_tokens=6)))
    finally:
        other.stop()
    return done.tokens


def test_every_rank_of_two_takes_its_part(folders):
    folder, layout = folders["moe"], EngineLayout(tp=2, ep=2)
    engine = made(folder, "fp8_block", layout)
    engine.start()
    try:
        store = open_store()
        agreement = Agreement(Layout(), layout, 100_000, "gloo", Meeting("127.0.0.1", store.port, 3, 1, 20.0))
        trainer = TrainerMember(agreement, engine.arch, engine.table, 0, list(megatron_parameters(folder, Layout(), 0).items()))
        assert engine.agree_refit(agreement, 0) == [trainer.digest] * 2
        together(trainer.join, engine.join_refit)
        trainer.check()
        trainer.prepare()
        engine.prepare_refit(0)
        _, reports = together(lambda: trainer.send(Refit(0)), lambda: engine.receive_refit(Refit(0)))
        assert [r["verified"] > 50 for r in reports] == [True, True]
        engine.commit_refit(0)
        trainer.close()
    finally:
        engine.stop()


def test_a_rank_that_refuses_is_heard_and_lives_on(engine, folder):
    with pytest.raises(RefitError, match=r"this SGLang rank has not agreed to a refit; agree_refit comes first"):
        engine.disconnect_refit()
        engine.join_refit()
    with pytest.raises(RefitError, match=r"AttributeError: .*no_such_command"):
        engine._rpc("no_such_command")
    assert len(run(engine, request("alive"))[0].tokens) == 8


def test_a_refit_that_fails_poisons_the_engine(engine, folder):
    trainer = connect(engine, folder)
    version = engine.health()["version"] + 1
    trainer.check()
    trainer.prepare()
    engine.prepare_refit(version)
    _, failure = together(lambda: trainer.send(Refit(version + 7)), lambda: engine.receive_refit(Refit(version)))
    assert isinstance(failure, RefitError) and f"as version {version + 7}" in str(failure)
    with pytest.raises(EngineError, match="serves nothing: a refit failed"):
        run(engine, request("poisoned"))
    with pytest.raises(RefitError, match=f"commit of version {version}, but version"):
        engine.commit_refit(version)
    engine.disconnect_refit()
    trainer.close()
    refit_engine(engine, folder, version)
    assert len(run(engine, request("cured"))[0].tokens) == 8


# --- what the worker maps ----------------------------------------------------------------------------------------------


def sglang_model(folder, table: PrecisionTable, layout: EngineLayout, rank: int, backend: str = "triton"):
    from sglang.srt.model_params import FakeModel
    from sglang.srt.server_args import ServerArgs

    config = ServerArgs(str(folder)).hf_config | {"quantization_config": table.quantization_config()}
    return FakeModel(config, layout.tp, layout.ep, rank, backend)


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize("layout", [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_slices_land_where_sglang_keeps_them(folders, kind, layout, format):
    if layout.ep > 1 and kind != "moe":
        pytest.skip("a dense model has no experts to divide")
    arch = Arch.load(folders[kind])
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    whole = reference(folders[kind], table)
    for rank in range(layout.tp):
        model = sglang_model(folders[kind], table, layout, rank)
        landings = map_parameters(dict(model.named_parameters()), arch, table, layout, rank)
        for name, place in landings.places.items():
            place.view.copy_(whole[name][tuple(slice(a, b) for a, b in place.box)])
        if layout.tp == 1:
            for name in whole:
                assert torch.equal(model.held(name).float(), whole[name].float()), name
        else:  # the stand-in cuts by itself
            q = "model.layers.1.self_attn.q_proj.weight"
            (start, stop), _ = wanted(q, tuple(whole[q].shape), arch, layout, layout.at(rank))
            assert torch.equal(model.held(q).float(), whole[q][start:stop].float())


def test_a_parameter_that_a_refit_would_not_write_is_named(folders):
    arch = Arch.load(folders["tied"])
    table = PrecisionTable.build(arch, PrecisionPolicy("fp8_block"))
    parameters = dict(sglang_model(folders["tied"], table, EngineLayout(), 0).named_parameters())
    for surprise in ("model.surprise.weight", "lm_head.weight"):
        with pytest.raises(RefitError, match=rf"{surprise} \[3, 2\]: a refit would write 0 of 6 values"):
            map_parameters(parameters | {surprise: torch.zeros(3, 2)}, arch, table, EngineLayout(), 0)
    del parameters["model.layers.0.mlp.down_proj.weight_scale_inv"]
    with pytest.raises(RefitError, match=r"SGLang has no parameter model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"):
        map_parameters(parameters, arch, table, EngineLayout(), 0)


def test_layouts_that_kernels_rearrange_are_refused(folders):
    table = PrecisionTable.build(Arch.load(folders["moe"]), PrecisionPolicy("fp8_block"))
    model = sglang_model(folders["moe"], table, EngineLayout(), 0)
    refuse_other_layouts(model)
    refuse_other_layouts(sglang_model(folders["moe"], table, EngineLayout(), 0, "deep_gemm"))
    other = sglang_model(folders["moe"], table, EngineLayout(), 0, "flashinfer_trtllm")
    with pytest.raises(
        RefitError, match=r"experts of model\.layers\.0\.mlp\.experts with flashinfer_trtllm, .*moe_runner_backend = triton"
    ):
        refuse_other_layouts(other)
    model.get_parameter("model.layers.0.self_attn.qkv_proj.weight_scale_inv").format_ue8m0 = True
    with pytest.raises(RefitError, match=r"qkv_proj\.weight_scale_inv as powers of two \(UE8M0\); .*fp8_gemm_runner_backend = triton"):
        refuse_other_layouts(model)
    model.model.norm.quant_method = object()
    with pytest.raises(RefitError, match=r"SGLang runs model\.norm with object, whose layout no refit knows"):
        refuse_other_layouts(model)


# --- start and end -----------------------------------------------------------------------------------------------------


def test_arguments_are_ours_where_they_must_be_and_the_recipes_elsewhere(folder):
    engine = made(folder, "fp8_block", mem_fraction_static=0.5, custom_weight_loader=["mine.loader"], json_model_override_args='{"x": 1}')
    found = engine.engine_args()
    assert found["fp8_gemm_runner_backend"] == "triton" and found["context_length"] == 518
    assert found["mem_fraction_static"] == 0.5 and found["custom_weight_loader"] == ["mine.loader", LOADER]
    assert '"x": 1' in found["json_model_override_args"] and "weight_block_size" in found["json_model_override_args"]
    owned = OWNED_ENGINE["sglang"]
    ours = {"model_path", "skip_tokenizer_init", "load_format", "dtype", "tp_size", "ep_size", "sampling_defaults", "enable_memory_saver"}
    assert ours <= owned.keys()


def test_settings_that_sglang_does_otherwise_are_refused(folder, folders, monkeypatch):
    with pytest.raises(
        EngineError, match=r"rollout\.parallel\.ep = 2 with tp = 4: SGLang orders expert ranks differently; use ep = 1 or 4"
    ):
        made(folders["moe"], layout=EngineLayout(tp=4, ep=2)).start()
    with pytest.raises(
        EngineError, match=r"rollout\.sglang: .*unexpected keyword argument 'gpu_memory_utilization'; options are the fields"
    ):
        made(folder, gpu_memory_utilization=0.5).start()
    with pytest.raises(EngineError, match=r"SGLang did not start: ValueError: moe_runner_backend = 'tritn'"):
        made(folder, moe_runner_backend="tritn").start()
    with pytest.raises(EngineError, match=r"started without memory saving; set rollout\.colocated = true"):
        made(folder).sleep()
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB gives log-probs at temperature 1"):
        made(folder).start()


def test_a_request_that_sglang_cuts_short_is_an_error(small):
    with pytest.raises(EngineError, match=r"SGLang ended it after \d+ of 60 tokens: its context or KV cache is too small"):
        run(small, request("clipped", (3, 4, 5, 6, 7), max_tokens=60))


def test_a_process_that_ends_ends_the_waiting(small):
    async def all_three() -> list:
        running = asyncio.ensure_future(small.generate(request("running", (3,), max_tokens=59)))
        await asyncio.sleep(0.05)
        pausing = asyncio.ensure_future(asyncio.to_thread(small.pause, "drain"))
        await asyncio.sleep(0.01)
        held = asyncio.ensure_future(small.generate(request("held", (3, 4))))
        os.kill(small._engine.get_all_child_pids()[0], signal.SIGKILL)
        return await asyncio.gather(running, pausing, held, return_exceptions=True)

    for outcome in asyncio.run(all_three()):
        assert isinstance(outcome, EngineLost) and "has ended" in str(outcome), outcome
    assert not small.health()["alive"] and "has ended" in small.health()["poisoned"]
    with pytest.raises(EngineLost, match="serves nothing"):
        run(small, request("late"))
    with pytest.raises(EngineLost, match="has ended"):
        small.prepare_refit(9)
