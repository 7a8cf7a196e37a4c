"""A scheduler process: continuous batching, a prefix cache, control messages between passes, weights by custom loaders."""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.managers import io_struct as io
from sglang.srt.model_params import FakeModel
from sglang.srt.sampling import sample
from sglang.srt.utils import MultiprocessingSerializer

ALL_TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass(eq=False)
class Req:
    obj: io.GenerateReqInput
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    slot: int = -1
    to_finish: dict | None = None
    reason: dict | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.obj.input_ids, *self.output_ids]


class Scheduler:
    def __init__(self, server_args, rank: int, pipe, barrier) -> None:
        self.args, self.rank, self.pipe, self.barrier = server_args, rank, pipe, barrier
        assert server_args.skip_tokenizer_init and server_args.load_format == "dummy", "the stand-in has no tokenizer and reads no files"
        config, tp = server_args.hf_config, server_args.tp_size
        self.model = FakeModel(config, tp, server_args.ep_size, rank, server_args.moe_runner_backend)
        self.engine = Generator(config, server_args.model_path, self.model) if tp == 1 else None
        self.max_req_len = min(server_args.context_len, server_args.pool_tokens) - 1
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.paused, self.pending_flush, self.offload_tags = False, None, set()

    # --- control ---------------------------------------------------------------------------------------------------

    def run_event_loop(self) -> None:
        while True:
            while self.pipe.poll(0 if (self.running or self.waiting or self.pending_flush) and not self.paused else 0.05):
                self.process(self.pipe.recv())
            if not self.paused:
                self.check_pending_flush()
                self.step()

    def process(self, message: Any) -> None:
        answer = getattr(self, "on_" + type(message).__name__)(message)
        if answer is not None and self.rank == 0:
            self.pipe.send(answer)

    def on_PauseGenerationReqInput(self, message) -> None:
        assert message.mode in ("in_place", "retract")
        self.paused = True

    def on_ContinueGenerationReqInput(self, message) -> None:
        self.paused = False

    def on_AbortReq(self, message) -> None:
        def meant(req: Req) -> bool:
            return message.abort_all or req.obj.rid.startswith(message.rid)

        for req in [r for r in self.waiting if meant(r)]:
            self.waiting.remove(req)
            req.reason = {"type": "abort", "message": "Abort in waiting queue"}
            self.send(req, ran=False)
        for req in self.running:
            if meant(req):
                req.to_finish = {"type": "abort", "message": "Aborted"}

    def is_fully_idle(self) -> bool:
        return not self.running and not self.waiting

    def flush_cache(self) -> bool:
        if (idle := self.is_fully_idle()) and self.engine:
            self.engine.prefixes.clear()
        return idle

    def on_FlushCacheReqInput(self, message):
        if self.pending_flush is not None:
            return io.FlushCacheReqOutput(success=False, message="Another flush_cache is already in progress.")
        if not message.timeout_s or self.is_fully_idle():
            return io.FlushCacheReqOutput(success=self.flush_cache())
        self.pending_flush = time.monotonic() + message.timeout_s
        return None

    def check_pending_flush(self) -> None:
        if self.pending_flush is None:
            return
        late = time.monotonic() >= self.pending_flush
        if self.is_fully_idle() or late:
            self.pending_flush = None
            message = "" if not late else "Timed out waiting for idle state."
            self.pipe.send(io.FlushCacheReqOutput(success=self.flush_cache(), message=message))

    def on_UpdateWeightsFromTensorReqInput(self, message):
        named = MultiprocessingSerializer.deserialize(message.serialized_named_tensors[self.rank])
        named = [(name, tensor.to("cpu")) for name, tensor in named]
        if message.load_format not in self.args.custom_weight_loader:
            raise NotImplementedError(f"Unknown load_format={message.load_format}")
        module, function = message.load_format.rsplit(".", 1)
        with torch.inference_mode():
            getattr(importlib.import_module(module), function)(self.model, named)
        if self.engine:
            self.engine.stale = True
        if message.flush_cache:
            assert self.flush_cache(), "Cache flush failed after updating weights"
        self.barrier.wait()  # of the tensor-parallel group
        return io.UpdateWeightsFromTensorReqOutput(success=True, message="Success")

    def on_ReleaseMemoryOccupationReqInput(self, message):
        assert self.is_fully_idle(), "release_memory_occupation should be called only when server is idle."
        tags = message.tags or ALL_TAGS
        self.offload_tags |= set(tags)
        if "kv_cache" in tags:
            self.flush_cache()
        if "weights" in tags and self.args.enable_memory_saver:
            for parameter in self.model.parameters():  # comes back with whatever the memory held
                parameter.data = torch.full_like(parameter, float("nan"))
        return io.ReleaseMemoryOccupationReqOutput()

    def on_ResumeMemoryOccupationReqInput(self, message):
        for tag in message.tags or ALL_TAGS:
            self.offload_tags.remove(tag)
        return io.ResumeMemoryOccupationReqOutput()

    def on_CheckWeightsReqInput(self, message):
        def checksum(p: torch.Tensor) -> str:
            return hashlib.sha256(p.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()

        sums = {name: checksum(p) for name, p in self.model.named_parameters() if p.dim()}
        return io.CheckWeightsReqOutput(success=True, message="Success.", payload=[{"checksums": sums}])

    # --- requests --------------------------------------------------------------------------------------------------

    def on_GenerateReqInput(self, message) -> None:
        assert self.engine and not self.offload_tags, "the stand-in generates with one rank that is awake"
        length, params = len(message.input_ids), message.sampling_params
        clipped = min(params["max_new_tokens"], self.max_req_len - length - 1, self.args.pool_tokens - length - 2)
        req = Req(message, max(0, clipped))
        if length >= self.max_req_len - 5:
            problem = f"Input length ({length} tokens) exceeds the maximum allowed length ({self.max_req_len - 5} tokens)."
        elif message.return_sampling_mask and params.get("top_k", -1) == -1:
            problem = "return_sampling_mask requires finite top_k"
        else:
            self.waiting.append(req)
            return
        req.reason = {"type": "abort", "message": problem, "status_code": 400}
        self.send(req, ran=False)

    def step(self) -> None:
        limit = self.args.max_running_requests or 128
        fresh, self.waiting = self.waiting[: limit - len(self.running)], self.waiting[max(0, limit - len(self.running)) :]
        free = iter(sorted(set(range(limit)) - {req.slot for req in self.running}))
        with torch.inference_mode():
            for req in fresh:
                req.slot = next(free)
            for reqs, logits in self.engine.prefill(fresh, cached=not self.args.disable_radix_cache) if fresh else ():
                self.accept(reqs, logits)
            old = [req for req in self.running if req not in fresh]
            self.running += fresh
            if old:
                self.accept(old, self.engine.decode(old))
        for req in [r for r in self.running if r.reason is not None]:
            self.running.remove(req)
            self.send(req)

    def accept(self, reqs: list[Req], logits: torch.Tensor) -> None:
        deterministic = self.args.enable_deterministic_inference
        for req, token, plain, truncated in sample(reqs, logits, deterministic):
            req.output_ids.append(token)
            req.logprobs.append((plain, token, None))
            req.sampling_logprobs.append(truncated)
            params = req.obj.sampling_params
            if req.to_finish is not None:
                req.reason = req.to_finish
            elif len(req.output_ids) >= req.max_new_tokens:  # before any stop token is looked at
                req.reason = {"type": "length", "length": req.max_new_tokens}
            elif not params.get("ignore_eos") and token in {*(params.get("stop_token_ids") or ()), *self.args.eos_token_ids}:
                req.reason = {"type": "stop", "matched": token}

    def send(self, req: Req, ran: bool = True) -> None:
        meta: dict[str, Any] = {"id": req.obj.rid, "finish_reason": req.reason, "completion_tokens": len(req.output_ids)}
        if ran:
            meta |= {"prompt_tokens": len(req.obj.input_ids), "cached_tokens": req.cached_tokens}
        if req.obj.return_logprob:
            meta |= {"output_token_logprobs": req.logprobs, "input_token_logprobs": []}
        if req.obj.return_sampling_mask and ran:
            meta["output_token_sampling_logprobs"] = req.sampling_logprobs
        self.pipe.send({"output_ids": req.output_ids, "meta_info": meta})


class Generator:
    """The embedded engine's model, filled from SGLang's parameters whenever they may have changed."""

    def __init__(self, config: dict, folder: str, model: FakeModel) -> None:
        from trt_rl.arch import Arch
        from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
        from trt_rl.rollout.hf_model import SlotCache, build

        self.model, self.stale = model, True
        quantized, arch = config.get("quantization_config"), Arch.load(folder)
        named = [m for m in (quantized or {}).get("modules_to_not_convert", ()) if m != "lm_head" and not m.endswith("mlp.gate")]
        exclude = tuple(f"{m}.*" if m.endswith(".experts") else m for m in named)
        table = PrecisionTable.build(arch, PrecisionPolicy("fp8_block" if quantized else "bf16", exclude))
        self.hf, self.live = build(folder, arch, table, torch.device("cpu"))
        self.cache, self.prefixes = SlotCache(arch, torch.device("cpu")), {}

    def prefill(self, reqs: list[Req], cached: bool):
        """Requests of equal shape, and logits after their prompts. A prompt that was seen is taken from the cache, but for
        its last token."""
        self.refresh()
        shapes: dict[tuple[int, int], list[Req]] = {}
        for req in reqs:
            prompt = tuple(req.obj.input_ids)
            self.cache.reserve(req.slot + 1, len(prompt) + req.max_new_tokens)
            if cached and prompt in self.prefixes:
                req.cached_tokens = len(prompt) - 1
                self.cache.write([req.slot], [layer[:, :, : len(prompt) - 1] for layer in self.prefixes[prompt]])
            shapes.setdefault((req.cached_tokens, len(prompt)), []).append(req)
        for (start, length), group in shapes.items():
            tokens = [req.obj.input_ids[start:] for req in group]
            yield group, self.forward([req.slot for req in group], tokens, [start] * len(group))
            for req in group:
                self.prefixes[tuple(req.obj.input_ids)] = self.cache.read(req.slot, length)

    def decode(self, reqs: list[Req]) -> torch.Tensor:
        return self.forward([r.slot for r in reqs], [r.ids[-1:] for r in reqs], [len(r.ids) - 1 for r in reqs])

    def forward(self, slots: list[int], tokens: list[list[int]], starts: list[int]) -> torch.Tensor:
        ids = torch.tensor(tokens)
        positions = torch.tensor(starts).unsqueeze(-1) + torch.arange(ids.shape[1])
        width = int(positions.max()) + 1
        mask = (torch.arange(width) <= positions.unsqueeze(-1)).unsqueeze(1)
        cache = self.cache.at(torch.tensor(slots), positions, width)
        hidden = self.hf.model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
        return self.hf.lm_head(hidden.last_hidden_state[:, -1])

    def refresh(self) -> None:
        if self.stale:
            for name, place in self.live.items():
                place.copy_(self.model.held(name))
            self.stale = False


def run_scheduler_process(server_args, rank: int, pipe, barrier) -> None:
    try:
        torch.set_num_threads(1)
        scheduler = Scheduler(server_args, rank, pipe, barrier)
        pipe.send({"status": "ready", "max_req_input_len": scheduler.max_req_len - 5})
        scheduler.run_event_loop()
    except EOFError:  # the parent has ended
        return
    except BaseException:
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGQUIT)
        raise
