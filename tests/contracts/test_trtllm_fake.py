"""The stand-in for TensorRT-LLM keeps what it promises: an adapter that passes on it has met the package's contract."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contracts.trtllm_fake.support import (
    FAKE,
    HERE,
    PROMPT,
    SIZES,
    extension,
    fp8,
    handles,
    imported,
    in_release,
    logprobs,
    reference,
    refit,
    running,
    sampling,
    unfused,
    widened,
)
from tests.support.models import write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("trtllm")
    made = {}
    for kind in ("dense", "moe", "moe32"):  # experts are loaded as bits: an FP32 engine needs an FP32 folder
        dtype, extra = torch.float32 if kind == "moe32" else torch.bfloat16, {} if kind == "dense" else dict(moe_intermediate_size=256)
        made[kind] = write_model(root / kind, kind.removesuffix("32"), dtype, **SIZES, **extra)
        file = made[kind] / "model.safetensors"
        save_file({n: t * 0.5 if t.dim() == 2 else t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def cluster():
    import ray

    imported()
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{FAKE}:{os.getcwd()}"}},
    )
    yield ray
    ray.shutdown()


# --- generation ------------------------------------------------------------------------------------------------------


async def is_transformers(llm, folder) -> None:
    done = await asyncio.gather(*[llm.generate_async(PROMPT[:n], sampling(logprobs=0)) for n in (72, 5, 33)])
    assert [d.outputs[0].token_ids for d in done] == [reference(folder, PROMPT[:n]) for n in (72, 5, 33)]
    assert all(d.outputs[0].finish_reason == "length" and len(d.outputs[0].logprobs) == 8 for d in done)


def test_a_moe_on_two_ranks_is_transformers(cluster, folders):
    async def test(llm):
        await is_transformers(llm, folders["moe32"])
        found = (await llm.collective_rpc("parameters_of"))[0]
        assert found["model.layers.0.self_attn.qkv_proj.weight"] == ((2 * 128 + 2 * 128, 128), "torch.float32")
        assert found["lm_head.weight"][0] == found["model.embed_tokens.weight"][0] == (65, 128)
        assert found["model.layers.1.mlp.experts.w3_w1_weight"][0] == (2, 512, 128)
        assert [rank for rank, _ in await llm.collective_rpc("identity")] == [0, 1]

    layout = dict(tensor_parallel_size=2, moe_expert_parallel_size=2)
    running(folders["moe32"], test, ray_worker_extension_cls=extension(), **layout)


def test_a_dense_model_on_one_rank_is_transformers(engine, folders):
    engine(lambda llm: is_transformers(llm, folders["dense"]))


@pytest.fixture(scope="module")
def engine(cluster, folders):
    """One engine for the tests that leave it as it was: (run a coroutine function on it)."""
    loop = asyncio.new_event_loop()
    llm = imported().AsyncLLM(
        model=str(folders["dense"]), skip_tokenizer_init=True, ray_worker_extension_cls=extension(), dtype="float32",
        max_input_len=100, max_seq_len=200,
    )  # fmt: skip
    loop.run_until_complete(llm.setup_async())
    yield lambda test: loop.run_until_complete(asyncio.wait_for(test(llm), 120))
    llm.shutdown()
    loop.close()


def test_logprobs_are_raw_or_processed(engine):
    from tensorrt_llm.sampling_params import LogprobMode

    async def test(llm):
        plain = dict(temperature=0.5, logprobs=0)
        raw = (await llm.generate_async(PROMPT, sampling(**plain, max_tokens=1))).outputs[0]
        token = raw.token_ids[0]
        for mode in (LogprobMode.RAW, LogprobMode.PROCESSED):
            out = (await llm.generate_async(PROMPT, sampling(**plain, top_k=3, max_tokens=4, logprobs_mode=mode))).outputs[0]
            assert len(out.logprobs) == 4 and all(t in entry for t, entry in zip(out.token_ids, out.logprobs, strict=True))
            if mode == LogprobMode.PROCESSED:
                assert all(entry[t].logprob > -20 for t, entry in zip(out.token_ids, out.logprobs, strict=True))
        assert raw.logprobs[0][token].logprob < 0
        simple = (await llm.generate_async(PROMPT, sampling(logprobs=0, logprobs_simple_format=True))).outputs[0]
        assert all(isinstance(p, float) for p in simple.logprobs)
        two = (await llm.generate_async(PROMPT, sampling(logprobs=2, max_tokens=1, temperature=1.0))).outputs[0]
        assert len(two.logprobs[0]) in (2, 3)
        assert (await llm.generate_async(PROMPT, sampling())).outputs[0].logprobs == []

    engine(test)


def test_stop_rules(engine):
    async def test(llm):
        free = (await llm.generate_async(PROMPT, sampling())).outputs[0].token_ids
        stop = free[3]
        upto = free[: free.index(stop) + 1]
        by_end = (await llm.generate_async(PROMPT, sampling(end_id=stop))).outputs[0]
        assert (by_end.token_ids, by_end.finish_reason) == (upto, "stop")
        by_word = (await llm.generate_async(PROMPT, sampling(stop_token_ids=[stop], logprobs=0))).outputs[0]
        assert by_word.token_ids == upto[:-1] and by_word.stop_reason == stop and len(by_word.logprobs) == len(upto)
        kept = (await llm.generate_async(PROMPT, sampling(stop_token_ids=[stop], include_stop_str_in_output=True))).outputs[0]
        assert kept.token_ids == upto
        long = (await llm.generate_async(PROMPT, sampling(max_tokens=1000))).outputs[0]
        assert len(long.token_ids) == 200 - len(PROMPT), "max_tokens is cut down to max_seq_len in silence"

    engine(test)


def test_bad_requests_are_refused_in_their_way(engine):
    from tensorrt_llm.executor import RequestError

    trt = imported()

    async def test(llm):
        with pytest.raises(RequestError, match=r"Prompt length \(120\) exceeds maximum input length \(100\)"):
            await llm.generate_async([3] * 120, sampling())
        with pytest.raises(RequestError, match="Token ID out of range"):
            await llm.generate_async([500], sampling())
        with pytest.raises(ValueError, match="tokenizer is required to reset end_id"):
            llm.generate_async(PROMPT, trt.SamplingParams())
        with pytest.raises(RuntimeError, match="is not processed by tokenizer"):
            llm.generate_async(PROMPT, sampling(stop="x"))

    engine(test)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        trt.SamplingParams(beams=1)
    with pytest.raises(ValueError, match="top_k >= 0"):
        trt.SamplingParams(end_id=-1, top_k=-1)
    with pytest.raises(ValueError, match="Greedy decoding"):
        trt.SamplingParams(end_id=-1, n=2)
    with pytest.raises(ValueError, match=r"quant_config\n  Extra inputs are not permitted"):
        trt.AsyncLLM(model="/nowhere", quant_config={})


def test_streams_and_aborts_keep_what_there_is(engine):
    async def test(llm):
        result = llm.generate_async(PROMPT, sampling(max_tokens=120, logprobs=0), streaming=True)
        seen = 0
        async for part in result:
            seen += 1
            if seen == 3:
                part.abort()
        out = result.outputs[0]
        assert out.finish_reason == "cancelled" and 3 <= len(out.token_ids) < 120 and len(out.logprobs) == len(out.token_ids)

    engine(test)


def test_prefixes_are_reused_until_they_are_reset(engine):
    async def test(llm):
        prompt = [9, *PROMPT]
        first = await llm.generate_async(prompt, sampling())
        again = await llm.generate_async(prompt, sampling())
        assert first.cached_tokens == 0 and again.cached_tokens == len(prompt) - 1  # whole blocks and, partly, the last
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        await llm.collective_rpc("reset_prefix_cache")
        assert (await llm.generate_async(prompt, sampling())).cached_tokens == 0

    engine(test)


def test_seeds_are_ignored_before_rc29(engine):
    async def test(llm):
        two = [(await llm.generate_async(PROMPT, sampling(temperature=1.0, seed=1, max_tokens=16))).outputs[0].token_ids for _ in range(2)]
        assert two[0] != two[1]

    engine(test)


# --- control ---------------------------------------------------------------------------------------------------------


def test_a_control_action_drains_and_takes_nothing_in(engine):
    async def test(llm):
        order = []

        async def one(name, work):
            await work
            order.append(name)

        running_one = llm.generate_async(PROMPT, sampling(max_tokens=100))
        await asyncio.sleep(0.1)
        control = asyncio.ensure_future(one("control", llm.collective_rpc("wait_for_engine_idle")))
        await asyncio.sleep(0.1)
        later = llm.generate_async(PROMPT, sampling(max_tokens=1))
        await asyncio.gather(one("running", running_one.aresult()), control, one("later", later.aresult()))
        assert order.index("later") > order.index("running") and running_one.outputs[0].finish_reason == "length"

    engine(test)


def test_nested_control_actions_end_in_an_error(engine):
    import ray

    async def test(llm):
        with pytest.raises(ray.exceptions.RayTaskError, match="would deadlock here"):
            await llm.collective_rpc("nested")
        assert (await llm.generate_async(PROMPT, sampling(max_tokens=1))).finished

    engine(test)


def test_a_pause_ends_requests_and_refuses_new_ones(engine):
    async def test(llm):
        result = llm.generate_async(PROMPT, sampling(max_tokens=120))
        await asyncio.sleep(0.1)
        await llm.pause_generation()
        assert (await result).outputs[0].finish_reason == "cancelled"
        with pytest.raises(RuntimeError, match="AsyncLLM is paused"):
            llm.generate_async(PROMPT, sampling())
        await llm.resume_generation()
        assert (await llm.generate_async(PROMPT, sampling())).finished
        with pytest.raises(AttributeError, match="has no method called 'nonsense'"):
            await llm.collective_rpc("nonsense")
        with pytest.raises(ValueError, match="Sleep feature is not enabled"):
            await llm.release(["kv_cache"])

    engine(test)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ep"), [("dense", None), ("moe", 1)])
def test_a_dummy_fp8_engine_is_refitted_in_buckets(cluster, folders, kind, ep, tp=2):
    tensors = fp8(load_file(folders[kind] / "model.safetensors"))

    async def test(llm):
        params = await llm.collective_rpc("parameters_of")
        name = "model.layers.0.self_attn.o_proj.weight"
        assert params[0][name] == ((128, 512 // tp), "torch.float8_e4m3fn") and params[0][name + "_scale"][0] == (1, 4 // tp)
        assert params[0]["lm_head.weight"][1] == "torch.bfloat16"
        with pytest.raises(ValueError, match=r"Device UUID GPU-.* not found"):
            await llm.update_weights({"GPU-other": []})
        await refit(llm, tensors)
        assert not any(await llm.collective_rpc("latched"))
        entry = (await llm.generate_async(PROMPT, sampling(max_tokens=1, logprobs=130))).outputs[0].logprobs[0]
        got = torch.tensor([entry[t].logprob for t in range(130)])
        expected = logprobs(folders[kind], unfused(widened(tensors)))
        # The reference does not round activations to FP8.
        assert torch.corrcoef(torch.stack((got, expected)))[0, 1] > 0.995 and (got - expected).abs().max() < 0.25

    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    running(
        folders[kind], test, tensor_parallel_size=tp, moe_expert_parallel_size=ep, ray_worker_extension_cls=extension(),
        load_format="dummy", model_kwargs={"quantization_config": quantization},
    )  # fmt: skip


def test_new_weights_under_an_old_prefix_give_old_keys(cluster, folders):
    """Only finalising, or a reset of one's own, empties the reuse tree."""
    old = load_file(folders["dense"] / "model.safetensors")
    new = {n: -t if "k_proj" in n or "v_proj" in n else t for n, t in old.items()}

    async def test(llm):
        found = (await llm.collective_rpc("parameters_of"))[0]
        assert found["model.layers.0.self_attn.o_proj.weight"][1] == "torch.bfloat16", "fp8 without a block size quantizes nothing"
        probe = sampling(logprobs=0, max_tokens=1)
        score = lambda out: next(iter(out.outputs[0].logprobs[0].values())).logprob  # noqa: E731
        before = score(await llm.generate_async(PROMPT, probe))
        digest = await llm.collective_rpc("digest_of", args=("model.layers.0.self_attn.qkv_proj.weight",))
        unknown = {"model.layers.0.self_attn.oh_proj.weight": torch.zeros(2, 2)}  # of no module: passed over in silence
        await llm.update_weights(await handles(llm, new | unknown, packed=False))
        assert await llm.collective_rpc("latched") == [True]
        assert digest != await llm.collective_rpc("digest_of", args=("model.layers.0.self_attn.qkv_proj.weight",))
        stale = await llm.generate_async(PROMPT, probe)
        assert stale.cached_tokens == len(PROMPT) - 1
        await llm.update_weights(None)
        fresh = await llm.generate_async(PROMPT, probe)
        assert fresh.cached_tokens == 0 and len({before, score(stale), score(fresh)}) == 3

    quantization = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    running(folders["dense"], test, model_kwargs=quantization, ray_worker_extension_cls=extension())


def test_sleep_and_wake(cluster, folders):
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig

    tensors = load_file(folders["dense"] / "model.safetensors")

    async def test(llm):
        before = (await llm.generate_async(PROMPT, sampling())).outputs[0].token_ids
        with pytest.raises(ValueError, match="is not a valid ExecutorMemoryType"):
            await llm.release(["weights"])
        await llm.release(["model_weights", "kv_cache"])
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await llm.update_weights(await handles(llm, tensors))
        await llm.resume(["model_weights"])
        await refit(llm, tensors, buckets=1)
        await llm.resume(["kv_cache"])
        assert (await llm.generate_async(PROMPT, sampling())).outputs[0].token_ids == before
        await llm.release(["kv_cache"])
        await llm.resume(["kv_cache"])
        out = await llm.generate_async(PROMPT, sampling(logprobs=0))
        assert out.cached_tokens > 0, "releasing does not forget the prefixes, whose keys are garbage now"
        assert out.outputs[0].token_ids != before
        await llm.release(["model_weights"])
        await llm.resume(["model_weights"])
        found = await llm.collective_rpc("digest_of", args=("model.norm.weight",))
        await refit(llm, tensors, buckets=1)
        assert found != await llm.collective_rpc("digest_of", args=("model.norm.weight",)), "restore mode NONE kept the weights"
        await llm.release(["kv_cache"])
        from tensorrt_llm.executor import RequestError

        with pytest.raises(RequestError, match="illegal memory access"):
            await llm.generate_async(PROMPT, sampling())

    modes = SleepConfig(restore_modes={ExecutorMemoryType("model_weights"): "NONE"})
    running(folders["dense"], test, sleep_config=modes, ray_worker_extension_cls=extension())


# --- processes -------------------------------------------------------------------------------------------------------


def test_starting_refuses_what_the_package_refuses(cluster, folders, monkeypatch):
    async def nothing(llm): ...

    with pytest.raises(RuntimeError, match="died during initialization") as caught:
        running(folders["dense"], nothing, ray_worker_extension_cls=f"{HERE}.Clashing")
    assert "already defines 'sleep', which conflicts with extension Clashing" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="must be provided together"):
        running(folders["dense"], nothing, placement_bundle_indices=[[0]])
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(RuntimeError, match="died during initialization"):
        running(folders["dense"], nothing)


def test_a_dead_worker_ends_its_requests(cluster, folders):
    async def test(llm):
        await is_transformers(llm, folders["dense"])
        result = llm.generate_async(PROMPT, sampling(max_tokens=180))
        await asyncio.sleep(0.1)
        cluster.kill(llm._executor.workers[1])
        with pytest.raises(RuntimeError, match=r"rank 1 died|Encountered an error in forward"):
            await result
        with pytest.raises(cluster.exceptions.RayActorError):
            await llm.collective_rpc("reset_prefix_cache")

    start = time.monotonic()
    # Two ranks share a GPU of a group of the caller's own.
    group = cluster.util.placement_group([{"GPU": 1, "CPU": 2}])
    cluster.get(group.ready())
    placed = dict(placement_groups=[group], placement_bundle_indices=[[0, 0]], per_worker_gpu_share=0.4)
    running(folders["dense"], test, tensor_parallel_size=2, dtype="float32", **placed)
    cluster.util.remove_placement_group(group)
    assert time.monotonic() - start < 200


NESTED_GUARD = """
import asyncio, os, ray, sys, torch
from tensorrt_llm import AsyncLLM, SamplingParams
folder = sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"]
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
async def main():
    async with AsyncLLM(model=folder, skip_tokenizer_init=True, sleep_config={},
                        ray_worker_extension_cls="tests.contracts.trtllm_fake.support.Both") as llm:
        try:
            await llm.collective_rpc("nested")
        except RuntimeError as error:
            print("not re-entrant" in str(error))
        await llm.release()
        print((await llm.get_memory_status()).state, len((await llm.get_memory_status()).parked_tags))
        await llm.resume()
        print((await llm.get_memory_status()).state)
        ask = lambda seed: llm.generate_async([5, 6], SamplingParams(end_id=-1, max_tokens=12, temperature=1.0, seed=seed))
        tokens = [(await ask(seed)).outputs[0].token_ids for seed in (1, 1, 2)]
        print(tokens[0] == tokens[1] != tokens[2])
        await llm.update_weights(None)
        try:
            await llm.update_weights({})
        except ValueError:
            print(await llm.collective_rpc("latched"))
asyncio.run(main())
"""


def test_1_4_guards_reports_memory_heeds_seeds_and_clears_the_latch(folders):
    printed = in_release("1.4.0rc1", NESTED_GUARD, FOLDER=str(folders["dense"])).split("\n")
    assert printed[0] == "True" and printed[1].startswith("parked ") and printed[2:5] == ["running", "True", "[False]"]
