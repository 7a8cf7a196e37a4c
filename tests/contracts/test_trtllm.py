"""What the TensorRT-LLM adapter promises beyond the engine contract: refits into the package's own loader in every release that
can take them, sleep, pauses that keep, and what is heard when something fails. Over the contract fake, in real Ray processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import write_model
from tests.support.refits import ONE_RANK, refit_engine
from tests.support.trtllm import (
    REAL,
    Background,
    RemoteEngine,
    configured,
    drop_resets,
    fail_here,
    iterations,
    launcher_variables,
    node_of,
    norm_is_gone,
    pid,
    raise_here,
    refit,
    set_knobs,
    update_environment,
    why_not_started,
)
from trt_rl.arch import Arch
from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import expected_places
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.quantize import quantize_blocks
from trt_rl.refit.route import Placement
from trt_rl.refit.staging import fused_group
from trt_rl.refit.transports.link import Meeting
from trt_rl.rollout.engine import Completion, Request, Sampling, make_engine

pytestmark = [pytest.mark.trtllm, pytest.mark.skipif(REAL, reason="releases and faults are the contract fake's")]

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=512, num_hidden_layers=2,
    max_position_embeddings=2048, moe_intermediate_size=256,
)  # fmt: skip
LAYOUTS = {"1.2.1": ("dense", 1, 1), "1.3.0rc15": ("dense", 2, 1), "1.3.0rc29": ("moe", 2, 2), "1.4.0rc1": ("moe", 2, 1)}
"""Release -> model, tensor and expert parallelism."""
OTHER = 0.7
"""What weights are multiplied with in other versions: less than 1, or rounding would be amplified."""
PROMPT = tuple(range(3, 40))
LONG_PROMPT = tuple(range(200, 296))  # three blocks of the KV cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    quantize_blocks(((0, 128), (0, 128)), torch.ones(128, 128))  # brings ModelOpt, whose import outlasts the patience of a refit here
    made = {}
    for kind in ("dense", "moe"):
        made[kind] = write_model(tmp_path_factory.mktemp("trtllm") / kind, kind, torch.bfloat16, **SIZES)
        file = made[kind] / "model.safetensors"
        tensors = {name: tensor * 0.4 if tensor.dim() == 2 else tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return made


class Served:
    """One running engine and what its answers have to be."""

    def __init__(self, folder, release: str, references: dict) -> None:
        kind, tp, ep = LAYOUTS[release]
        self.folder, self.release, self.tp = folder, release, tp
        format = "bf16" if release == "1.2.1" else "fp8_block"
        self.references, self.key = references, (kind, format)
        self.engine = RemoteEngine(
            folder, format, tp, ep, release, sleep=True, max_batch_size=16, model_kwargs={"initializer_range": 0.5}
        )  # fmt: skip
        self.engine.within(update_environment, {"SLURM_PROCID": "0", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
        self.engine.start()

    def refit(self, scale: float = 1.0, **how: Any) -> list[dict[str, Any]]:
        return refit(self.engine, self.folder, scale, **how)

    def reference(self, scale: float) -> Any:
        """The embedded engine with the same precision table and weights."""
        key = (*self.key, scale)
        if key not in self.references:
            arch = Arch.load(self.folder)
            table = PrecisionTable.build(arch, PrecisionPolicy(key[1]))
            self.references[key] = made = make_engine("hf", str(self.folder), arch, table, EngineLayout(), {})
            made.start()
            refit_engine(made, self.folder, 0, scale)
        return self.references[key]

    def logprobs(self, scale: float, prompt, tokens) -> torch.Tensor:
        """Under the weights times `scale`, by one pass of the embedded engine's model: [tokens, vocabulary]."""
        model = self.reference(scale).model
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]

    def distance(self, scale: float, prompt, done, part: slice = slice(None)) -> float:
        """Mean difference of reported log-probs from those under weights times `scale`."""
        rows = self.logprobs(scale, prompt, done.tokens)
        expected = rows[torch.arange(len(done.tokens)), torch.tensor(done.tokens)][part]
        return float((expected - torch.tensor(done.logprobs)[part]).abs().mean())

    def serves(self, scale: float = 1.0, prompt=PROMPT) -> list[int]:
        """Tokens of one greedy request, which the weights times `scale` make as likely as any and others do not."""
        (done,) = run(self.engine, request("greedy", prompt, temperature=0.0, max_tokens=12))
        rows = self.logprobs(scale, prompt, done.tokens)
        assert float((rows.max(-1).values - rows[torch.arange(12), torch.tensor(done.tokens)]).max()) <= 0.25
        assert self.distance(scale, prompt, done) <= 0.06 < 0.2 <= self.distance(1 + OTHER - scale, prompt, done)
        assert set(done.versions) == {self.engine.health()["version"]}
        return done.tokens


@pytest.fixture(scope="module")
def serve(folders):
    """Get the engine of a release, which is started once and again after it was ended."""
    running: dict[str, Served] = {}
    references: dict = {}

    def get(release: str, end: bool = False) -> Served:
        if release not in running:
            running[release] = Served(folders[LAYOUTS[release][0]], release, references)
        return running.pop(release) if end else running[release]

    yield get
    for served in running.values():
        served.engine.close()
    for made in references.values():
        made.stop()


@pytest.fixture(params=list(LAYOUTS))
def any_release(request, serve):
    return serve(request.param)


def request(id: str, prompt=PROMPT, **sampling) -> Request:
    return Request(id, tuple(prompt), Sampling(**({"max_tokens": 8} | sampling)))


def run(engine, *requests: Request):
    return asyncio.run(engine.generate_many(list(requests)))


# --- refit ------------------------------------------------------------------------------------------------------


def test_a_refit_reaches_every_live_tensor_and_the_outputs(any_release):
    served, engine = any_release, any_release.engine
    layout = EngineLayout(engine.layout.tp, engine.layout.ep)
    held = [expected_places(engine.arch, engine.table, layout, layout.at(rank)) for rank in range(served.tp)]
    assert served.release == "1.2.1" or any(name.endswith("_scale_inv") for name in held[0])
    tokens = {}
    for scale in (OTHER, 1.0):
        reports = served.refit(scale)
        assert [report["live_tensors"] for report in reports] == [len(names) for names in held]
        assert all(report["verified"] and report["staging_bytes"] for report in reports)
        tokens[scale] = served.serves(scale)
    assert tokens[OTHER] != tokens[1.0]


@pytest.mark.parametrize("release", ["1.2.1", "1.3.0rc15"])
def test_prompts_may_be_as_long_as_the_model_allows(serve, release):
    served = serve(release)
    served.refit()
    prompt = [3 + i * 7 % 500 for i in range(1100)]
    (done,) = run(served.engine, request("long prompt", prompt, temperature=0.0))
    assert served.distance(1.0, prompt, done) <= 0.06


def test_the_recipes_model_kwargs_stand_beside_the_quantization(any_release):
    expected = (0.5, None if any_release.release == "1.2.1" else [128, 128])
    assert any_release.engine.in_workers(configured) == [expected] * any_release.tp


def test_launcher_variables_of_the_owner_do_not_reach_the_workers(any_release):
    assert any_release.engine.in_workers(launcher_variables) == [[]] * any_release.tp


@pytest.mark.parametrize("release", ["1.2.1", "1.3.0rc29"])
def test_no_prefix_outlives_its_weights(serve, release):
    served, engine = serve(release), serve(release).engine

    def cached() -> int:
        before = engine.stats()["cached_tokens"]
        run(engine, request("prefix", LONG_PROMPT, max_tokens=1))
        return engine.stats()["cached_tokens"] - before

    served.refit()
    assert [cached(), cached() >= 64] == [0, True]
    served.refit()
    assert cached() == 0
    engine.in_workers(drop_resets, True)  # it is the reset that does it
    served.refit()
    assert cached() >= 64
    engine.in_workers(drop_resets, False)


@pytest.mark.parametrize("release", ["1.3.0rc15", "1.3.0rc29"])
def test_what_a_loader_fuses_arrives_in_one_reload(serve, release):
    served = serve(release)
    bucket_bytes, engine = 70_000, served.engine
    meeting = Meeting("127.0.0.1", 1, 1 + served.tp, 1, 20.0)
    route = Agreement(ONE_RANK, engine.layout, bucket_bytes, "gloo", meeting).route(engine.arch, engine.table)
    buckets: dict[str, set[int]] = {}
    for bucket in route.buckets:
        for part in bucket.slices:
            buckets.setdefault(fused_group(part.name), set()).add(bucket.number)
    assert len(buckets["model.layers.0.self_attn"]) >= 4, "the parts of a fused matrix are in one bucket anyway"
    engine.in_workers(set_knobs, {"DEEPGEMM_KEYERROR": "1", "FIRST_SHARD_SCALE": "1"})
    served.refit(OTHER, bucket_bytes=bucket_bytes)
    engine.in_workers(set_knobs, {"DEEPGEMM_KEYERROR": None, "FIRST_SHARD_SCALE": None})
    served.serves(OTHER)


# --- what fails is heard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["1.3.0rc15", "1.4.0rc1"])
def test_a_rank_that_cannot_load_is_named_and_the_engine_recovers(serve, release):
    served, engine = serve(release), serve(release).engine
    served.refit()
    engine.in_workers(set_knobs, {"FAIL_RELOAD_RANK": "1"})
    with pytest.raises(RefitError, match=r"loader of engine rank 1 refused \d+ tensors from .*_RELOAD_RANK: rank 1") as failure:
        served.refit(OTHER)
    assert "engine rank 0" not in str(failure.value)
    with pytest.raises(EngineError, match=r"the engine serves nothing: a refit failed: .*engine rank 1"):
        run(engine, request("poisoned"))
    engine.in_workers(fail_here)
    with pytest.raises(RefitError, match=r"(?s)engine rank 0 refused.*engine rank 1 refused"):
        served.refit(OTHER)
    engine.in_workers(set_knobs, {"FAIL_RELOAD_RANK": None})
    served.refit(OTHER)
    served.serves(OTHER)


@pytest.mark.parametrize(
    ("release", "parameter", "tensor"),
    [
        ("1.3.0rc15", "model.norm.weight", r"model\.norm\.weight\[\[0, 256\]\]"),
        ("1.3.0rc15", "model.layers.1.self_attn.qkv_proj.weight_scale", r"model\.layers\.1\.self_attn\.q_proj\.weight_scale_inv\[\[2, 4\]"),
        ("1.3.0rc29", "model.layers.0.mlp.experts.w3_w1_weight", r"model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight\[\[0, 256\]"),
        ("1.4.0rc1", "model.layers.1.mlp.experts.w2_weight_scaling_factor", r"model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight_scale_inv"),
    ],
    ids=["a norm", "a scale of a fused matrix", "an expert", "an expert's scale"],
)  # fmt: skip
def test_one_wrong_bit_in_a_live_tensor_is_named(serve, release, parameter, tensor):
    served = serve(release)
    served.engine.in_workers(set_knobs, {"FLIP_BIT_RANK": "1", "FLIP_BIT_PARAMETER": parameter})
    with pytest.raises(RefitError, match=f"{tensor}.*: the live tensor of engine rank 1 does not hold what was given") as failure:
        served.refit()
    assert "engine rank 0" not in str(failure.value)
    with pytest.raises(EngineError, match="serves nothing"):
        run(served.engine, request("poisoned"))
    assert [report["live_tensors"] for report in served.refit(verify="off")] == [0, 0]  # nobody looks, and nobody sees
    served.engine.in_workers(set_knobs, {"FLIP_BIT_RANK": None, "FLIP_BIT_PARAMETER": None})
    served.refit()
    served.serves()


def test_a_spoilt_bucket_is_named_and_the_engine_recovers(serve):
    served = serve("1.3.0rc29")

    def spoil(slot) -> None:
        for part in slot.plan.slices:
            if part.name == "model.layers.1.self_attn.o_proj.weight_scale_inv":
                slot.raw(part)[0] ^= 1

    with pytest.raises(
        RefitError, match=r"layers\.1\.self_attn\.o_proj\.weight_scale_inv.* does not hold what trainer rank 0 sent"
    ) as failure:
        served.refit(OTHER, spoil=spoil)
    assert all(f"engine rank {rank}" in str(failure.value) for rank in range(served.tp))
    with pytest.raises(EngineError, match="serves nothing"):
        run(served.engine, request("poisoned"))
    served.refit()
    served.serves()


def test_an_error_of_one_worker_is_told_as_it_was(serve):
    with pytest.raises(RefitError, match=r"trt_rl_test failed in a TensorRT-LLM worker: KeyError: 'only of the last rank'"):
        serve("1.3.0rc15").engine.in_workers(raise_here)


def test_an_engine_that_is_silently_unquantized_is_refused(serve):
    engine = serve("1.2.1").engine
    real, engine.table = engine.table, PrecisionTable.build(engine.arch, PrecisionPolicy("fp8_block"))
    engine.within(setattr, "table", engine.table)
    try:
        with pytest.raises(
            RefitError,
            match=r"model\.layers\.0\.self_attn\.q_proj\.weight: TensorRT-LLM holds bfloat16\[512, 256\] where .* float8_e4m3fn\[512, 256\]",
        ):
            refit(engine, serve("1.2.1").folder)
    finally:
        engine.table = real
        engine.within(setattr, "table", real)


# --- start-up ---------------------------------------------------------------------------------------------------


def test_what_cannot_start_is_refused_by_name(serve):
    old, new = serve("1.2.1").engine, serve("1.3.0rc15").engine
    for engine in (old, new):
        assert re.search(r"did not start: ValidationError: .*\n?max_batchsize", engine.within(why_not_started, {"max_batchsize": 3}))
    assert "TensorRT-LLM 1.2.1 cannot load FP8 weights in parts" in (why := old.within(why_not_started, {}, "fp8_block"))
    assert "use 1.3.0rc15 or newer" in why
    assert "TensorRT-LLM 1.2.1 does not serve a replica across nodes" in old.within(why_not_started, {}, "bf16", 2)


# --- pauses that keep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["1.2.1", "1.3.0rc15", "1.4.0rc1"])
def test_a_kept_request_continues_under_the_new_weights(serve, release):
    served, engine, length = serve(release), serve(release).engine, 80
    served.refit(1.0)
    old, before = engine.health()["version"], engine.stats()
    start = engine.in_workers(iterations)[0][0]
    kept = Background(engine, request("kept", max_tokens=length, temperature=1.0, seed=5))
    while engine.in_workers(iterations)[0][0] < start + 20:
        time.sleep(0.02)
    engine.pause("keep")
    (count, idle), *_ = engine.in_workers(iterations)
    held = Background(engine, request("held"))
    time.sleep(0.5)
    assert engine.in_workers(iterations)[0] == (count, True) and idle, "something runs while the engine is paused"
    served.refit(OTHER)
    assert kept.outcome is held.outcome is None
    engine.resume()
    done = kept.finish()
    cut = done.versions.count(old)
    assert len(done.tokens) == len(done.logprobs) == length and done.finish == "length"
    assert 15 <= cut < length and done.versions == [old] * cut + [old + 1] * (length - cut)
    assert engine.stats()["continued"] - before["continued"] == 1
    for mine, other, part in ((1.0, OTHER, slice(0, cut)), (OTHER, 1.0, slice(cut, length))):
        assert served.distance(mine, PROMPT, done, part) <= 0.06 < 0.2 <= served.distance(other, PROMPT, done, part)
    assert held.finish().versions == [old + 1] * 8


def test_requests_that_wait_at_a_pause_can_be_aborted(serve):
    engine = serve("1.3.0rc15").engine
    serve("1.3.0rc15").refit()
    start = engine.in_workers(iterations)[0][0]
    kept = Background(engine, request("kept", max_tokens=500))
    while engine.in_workers(iterations)[0][0] < start + 5:
        time.sleep(0.02)
    engine.pause("keep")
    engine.pause("abort")  # nothing runs: it returns
    held = Background(engine, request("held"))
    time.sleep(0.3)
    engine.abort("kept")
    engine.abort("held")
    partial, empty = kept.finish(10), held.finish(10)
    assert partial.finish == empty.finish == "abort" and not empty.tokens
    assert 1 <= len(partial.tokens) < 500 and len(partial.logprobs) == len(partial.versions) == len(partial.tokens)
    engine.resume()
    serve("1.3.0rc15").serves()


# --- sleep ------------------------------------------------------------------------------------------------------


def test_an_engine_sleeps_takes_new_weights_and_wakes(any_release):
    served, engine = any_release, any_release.engine
    served.refit()
    tokens = served.serves(prompt=LONG_PROMPT)
    busy = Background(engine, request("busy", max_tokens=300))
    time.sleep(0.3)
    with pytest.raises(EngineError, match=r"1 requests are running; pause the engine \(drain or abort\) before it sleeps"):
        engine.sleep()
    engine.pause("abort")
    assert busy.finish().finish == "abort"
    engine.resume()
    engine.sleep()
    assert engine.in_workers(norm_is_gone) == [True] * served.tp
    with pytest.raises(EngineError, match="the engine serves nothing: asleep"):
        run(engine, request("asleep"))
    with pytest.raises(RefitError, match="the engine sleeps; wake its weights before a refit"):
        served.refit()
    engine.wake("weights")
    served.refit()
    with pytest.raises(EngineError, match=r"the engine sleeps \(kv_cache\); wake it first"):
        run(engine, request("half asleep"))
    engine.wake("kv_cache")
    before = engine.stats()["cached_tokens"]
    assert served.serves(prompt=LONG_PROMPT) == tokens
    assert engine.stats()["cached_tokens"] == before, "keys from before the sleep were used again"


def test_an_engine_that_was_not_started_to_sleep_says_so(folders):
    arch = Arch.load(folders["dense"])
    engine = make_engine("trtllm", str(folders["dense"]), arch, PrecisionTable.build(arch, PrecisionPolicy("bf16")), EngineLayout(), {})
    with pytest.raises(EngineError, match=r"not started to sleep; set rollout\.colocated = true"):
        engine.sleep()


# --- deaths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "rank", "hangs"), [("1.3.0rc29", 1, False), ("1.4.0rc1", 0, True)])
def test_a_killed_worker_ends_its_requests(serve, release, rank, hangs):
    serve(release).refit()
    engine = serve(release, end=True).engine
    try:
        if hangs:
            engine.within(update_environment, {"TRTLLM_FAKE_HANG_ON_DEATH": "1"})
        waiting = Background(engine, request("waiting", max_tokens=2000))
        time.sleep(0.5)
        os.kill(engine.in_workers(pid)[rank], signal.SIGKILL)
        outcome = waiting.finish(15)
        assert isinstance(outcome, EngineLost), repr(outcome)
        assert f"the TensorRT-LLM worker of rank {rank} ended" in str(outcome)
        with pytest.raises(EngineLost, match=f"the TensorRT-LLM worker of rank {rank} ended"):
            run(engine, request("later"))
        with pytest.raises(EngineLost):
            engine.reset_prefix_cache()
    finally:
        engine.release_places()


@pytest.mark.parametrize("release", ["1.3.0rc29", "1.4.0rc1"])
def test_a_worker_that_ends_while_idle_is_named_by_the_next_call(serve, release):
    serve(release).refit()
    engine = serve(release, end=True).engine
    try:
        os.kill(engine.in_workers(pid)[0], signal.SIGKILL)
        with pytest.raises(EngineLost, match="the TensorRT-LLM worker of rank 0 ended"):
            engine.pause("drain")
        assert not engine.health()["alive"]
    finally:
        engine.release_places()


# --- two nodes --------------------------------------------------------------------------------------------------


def two_nodes(folder: str) -> None:
    """Runs in a process of its own: a replica of two ranks in a cluster whose nodes have room for one each."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        quantize_blocks(((0, 128), (0, 128)), torch.ones(128, 128))
        served = Served(folder, "1.3.0rc15", {})
        nodes = served.engine.in_workers(node_of)
        assert len(set(nodes)) == 2 and nodes == list(served.engine.nodes)
        assert served.engine.within(node_of) == nodes[0]
        held = served.engine.table.wire_tensors()
        assert [r["live_tensors"] for r in served.refit(OTHER, placement=Placement((0,), (0, 1)))] == [len(held)] * 2
        (done,) = run(served.engine, request("spread", temperature=0.0, max_tokens=12))
        print("\nserved", json.dumps(asdict(done)))
        served.engine.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_replica_spans_nodes_and_its_owner_stands_by_rank_0(serve, folders):
    code = f"from tests.contracts.test_trtllm import two_nodes; two_nodes({str(folders['dense'])!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"^served (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    answer = Completion(**json.loads(found[1]))
    assert answer.versions == [1] * 12
    assert serve("1.3.0rc15").distance(OTHER, PROMPT, answer) <= 0.06 < 0.2 <= serve("1.3.0rc15").distance(1.0, PROMPT, answer)
