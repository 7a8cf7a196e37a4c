"""The GPU's way to fill, load and move buckets against the CPU's and ModelOpt's, bit for bit. Needs one GPU; NCCL needs two."""

from __future__ import annotations

import multiprocessing as mp

import pytest
import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.digest import digest
from trt_rl.refit.landing import Landings, Place, allocate
from trt_rl.refit.names import parameters
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.quantize import quantize_blocks
from trt_rl.refit.route import BucketPlan, Route, Slice
from trt_rl.refit.slot import Slot, raw_bytes
from trt_rl.refit.source import ShardSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
MOE = dict(
    model_type="qwen3_moe", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=1000, max_position_embeddings=64, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=256, norm_topk_prob=True,
)  # fmt: skip
DENSE = {k: v for k, v in MOE.items() if "expert" not in k and "moe" not in k and k != "norm_topk_prob"} | {"model_type": "qwen3"}


def weights(arch: Arch, layout: Layout, rank: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = parameters(arch, layout, layout.at(rank))
    return {n: torch.randn(s, generator=generator).mul(0.05).to(dtype).cuda() for n, s in shapes.items()}


def pair(config: dict, layout: Layout, format: str, dtype: torch.dtype = torch.bfloat16, engine: EngineLayout | None = None):
    """A fused source and ModelOpt's on the CPU, over the same weights."""
    from trt_rl.refit.kernels import FusedSource

    arch = Arch.from_dict(config)
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    route = Route.build(arch, table, layout, engine or EngineLayout(), 300_000)
    mine = weights(arch, layout, 0, dtype)
    scales = {n: 0.5 + i for i, n in enumerate(table.formats)}
    fused = FusedSource(arch, layout, 0, table, route, list(mine.items()), input_scales=scales)
    plain = ShardSource(arch, layout, 0, table, route, [(n, w.cpu()) for n, w in mine.items()], input_scales=scales)
    for source in (fused, plain):
        source.check()
        source.exchange()
    return arch, table, route, fused, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "fp8_per_tensor"])
@pytest.mark.parametrize(
    "config", [DENSE, MOE, DENSE | {"head_dim": 16, "num_attention_heads": 12, "hidden_size": 200}], ids=["dense", "moe", "odd"]
)
def test_fused_buckets_equal_modelopts(config, format, dtype):
    _, _, route, fused, plain = pair(config, Layout(), format, dtype)
    for plan in route.sent_by(0):
        here, there = (Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8, device=d)) for d in ("cuda", "cpu"))
        fused.fill(here, True)
        plain.fill(there, True)
        for part, a, b in zip(plan.slices, here.digests.tolist(), there.digests.tolist(), strict=True):
            assert torch.equal(here.raw(part).cpu(), there.raw(part)), part
            assert a == b, part


def single(box, values: torch.Tensor, amax_of: torch.Tensor | None = None):
    """One weight and its scales through the fused kernel."""
    from trt_rl.refit.kernels import FusedSource

    source = object.__new__(FusedSource)
    blocks = tuple((-(-a // 128), -(-b // 128)) for a, b in box)
    weight = Slice("w.weight", "float8_e4m3fn", box, 0, values.numel())
    at = -(-values.numel() // 16) * 16
    scale = Slice("w.weight_scale_inv", "float32", blocks, at, 4 * (blocks[0][1] - blocks[0][0]) * (blocks[1][1] - blocks[1][0]))
    plan = BucketPlan(0, 0, ((0,),), (weight, scale))

    class Table:
        formats = {"w.weight": "fp8_block"}

    source._parameters = [("w", values)]
    source.device, source.table, source.maxima, source.scales, source._tables, source._fixed = values.device, Table, {}, {}, {}, {}
    source.values = lambda part: values
    slot = Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda"))
    source.fill(slot, True)
    return slot.tensor(weight), slot.tensor(scale)


@pytest.mark.parametrize("kind", ["random", "tiny", "huge", "zero", "denormal", "mixed", "ties"])
def test_quantizer_bits_on_every_kind_of_input(kind):
    generator = torch.Generator("cuda").manual_seed(7)
    x = torch.randn(1024, 896, device="cuda", generator=generator)
    if kind == "tiny":
        x = x * 1e-36
    elif kind == "huge":
        x = x * 4e37
    elif kind == "zero":
        x = x * 0
    elif kind == "denormal":
        x = x * 1e-40
    elif kind == "mixed":
        x = x * torch.exp2(torch.randint(-120, 120, x.shape, device="cuda", generator=generator).float())
    elif kind == "ties":  # scale exactly 1: values fall on e4m3's rounding boundaries
        x = (
            torch.randint(0, 0x4400, x.shape, device="cuda", generator=generator)
            .to(torch.int16)
            .view(torch.bfloat16)
            .float()
            .clamp(max=448)
        )
        x[::128, ::128] = 448.0
    x = x.bfloat16()
    box = ((0, 1024), (0, 896))
    values, scales = single(box, x)
    expected, expected_scales = quantize_blocks(box, x.cpu())
    assert torch.equal(scales.cpu().view(torch.int32), expected_scales.view(torch.int32))
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))
    on_gpu, _ = quantize_blocks(box, x)  # ModelOpt on the GPU itself
    assert torch.equal(values.view(torch.uint8), on_gpu.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 8), (3, 4), (64, 132), (1000, 257 * 4)])
def test_digests_and_strided_landings(shape):
    from trt_rl.refit.kernels import FusedLandings

    rows, columns = shape
    inside = torch.zeros(rows + 3, columns + 8, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    view = inside[2 : 2 + rows, 4 : 4 + columns]
    part = Slice("w", "float8_e4m3fn", ((0, rows), (0, columns)), 0, rows * columns)
    plan = BucketPlan(0, 0, ((0,),), (part,))
    slot = Slot(plan, torch.randint(0, 120, (plan.nbytes,), dtype=torch.uint8, device="cuda"))
    sent = digest(slot.raw(part).cpu())
    slot.digests.copy_(torch.tensor([sent]))
    landings = FusedLandings(Landings({"w": Place(part.box, view)}))
    landings.load(slot, True)
    (arrival,) = landings.arrivals()
    assert not arrival.mismatches and arrival.verified == 1
    assert torch.equal(view.contiguous().view(torch.uint8).flatten(), slot.raw(part))
    assert digest(raw_bytes(view).cpu()) == sent
    assert int(inside.view(torch.uint8)[:2].sum()) == 0 and int(inside.view(torch.uint8)[:, :4].sum()) == 0
    again = Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda"))
    landings.fetch(again)
    assert torch.equal(again.raw(part), slot.raw(part))
    slot.digests.add_(1)
    landings.load(slot, True)
    assert landings.arrivals()[0].mismatches == [part]


def test_odd_bytes_are_refused_by_name():
    from trt_rl.refit.kernels import FusedLandings

    part = Slice("odd", "bfloat16", ((0, 3), (0, 3)), 0, 18)
    plan = BucketPlan(0, 0, ((0,),), (part,))
    landings = FusedLandings(Landings({"odd": Place(part.box, torch.zeros(3, 4, dtype=torch.bfloat16, device="cuda")[:, :3])}))
    with pytest.raises(RefitError, match="odd: rows that do not begin and end on 4-byte"):
        landings.load(Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda")), False)


# --- links ------------------------------------------------------------------------------------------------------


def _member(pipe, index: int, config, layout, engine, transport: str, port: int) -> None:
    from trt_rl.refit.member import Agreement, EngineMember, TrainerMember
    from trt_rl.refit.stream import Refit
    from trt_rl.refit.transports.link import Meeting

    torch.cuda.set_device(index % torch.cuda.device_count())
    arch = Arch.from_dict(config)
    table = PrecisionTable.build(arch, PrecisionPolicy("fp8_block"))
    members = layout.world + engine.world
    agreement = Agreement(layout, engine, 300_000, transport, Meeting("127.0.0.1", port, members, layout.world, 60.0))
    try:
        if index < layout.world:
            mine = weights(arch, layout, index)
            member = TrainerMember(agreement, arch, table, index, mine.items())
        else:
            landings = allocate(arch, table, engine, index - layout.world, "cuda")
            member = EngineMember(agreement, arch, table, landings)
        member.join()
        for version in range(2):
            if index < layout.world:
                member.check()
            member.prepare()
            refit = Refit(version, full=version == 0)
            report = member.send(refit) if index < layout.world else member.receive(refit)
            torch.cuda.synchronize()
        result = {n: p.view.cpu() for n, p in landings.places.items()} if index >= layout.world else None
        pipe.send((None, report.verified, result))
        pipe.recv()  # buffers that others read stay until all are done
    except BaseException as error:  # noqa: BLE001
        import traceback

        pipe.send((traceback.format_exc() + str(error), 0, None))


@pytest.mark.parametrize("transport", ["ipc", "nccl", "gloo"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_links_deliver_the_same_bits(transport, config):
    layout, engine = Layout(), EngineLayout()
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each member, one present")
    if transport == "gloo":
        pytest.skip("gloo is for machines without GPUs; tests/cpu covers it")
    arch, table, _, _, plain = pair(config, layout, "fp8_block")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, members = mp.get_context("spawn"), []
    for index in range(2):
        here, there = context.Pipe()
        process = context.Process(target=_member, args=(there, index, config, layout, engine, transport, store.port), daemon=True)
        process.start()
        members.append((process, here))
    results = []
    for _, here in members:
        assert here.poll(200), "a member does not answer"
        results.append(here.recv())
    for _, here in members:
        here.send(None)
    assert not [r[0] for r in results if r[0]], results
    route = Route.build(arch, table, layout, engine, 300_000)
    for plan in route.sent_by(0):
        slot = Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8))
        plain.fill(slot, False)
        for part in plan.slices:
            whole = results[1][2][part.name][tuple(slice(a, b) for a, b in part.box)]
            assert torch.equal(raw_bytes(whole), slot.raw(part)), part
    assert results[1][1] == sum(len(p.slices) for p in route.buckets)
