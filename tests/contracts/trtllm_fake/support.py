"""Fake only: what its tests share. Engines start with `running`; weights arrive as a trainer would send them."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch.multiprocessing.reductions import reduce_tensor

FAKE = str(Path(__file__).parent)
HERE = "tests.contracts.trtllm_fake.support"
PROMPT = list(range(3, 75))
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128, num_hidden_layers=2)


def imported(version: str = "1.3.0rc15"):
    """The fake, in this process. One process has one release: another needs a process of its own (`in_release`)."""
    os.environ["TRTLLM_FAKE_VERSION"] = version
    os.environ["TRTLLM_FAKE_NESTED_TIMEOUT_S"] = "1"
    if FAKE not in sys.path:
        sys.path.insert(0, FAKE)
    import tensorrt_llm

    assert tensorrt_llm.__version__ == version
    return tensorrt_llm


def in_release(version: str, code: str, **env: str) -> str:
    """Run `code` where `tensorrt_llm` is the fake of `version`; what it prints."""
    path = os.pathsep.join([FAKE, os.getcwd()])
    settings = os.environ | {"PYTHONPATH": path, "TRTLLM_FAKE_VERSION": version} | env
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def running(folder, test, **settings):
    """Start an engine, run the coroutine function `test` on it, end it."""
    llm_class = imported().AsyncLLM

    async def whole():
        llm = llm_class(model=str(folder), skip_tokenizer_init=True, **settings)
        try:
            await llm.setup_async()
            return await test(llm)
        finally:
            llm.shutdown()

    return asyncio.run(whole())


def sampling(**changes):
    return imported().SamplingParams(**(dict(end_id=-1, max_tokens=8, temperature=0.0) | changes))


def logprobs(folder, tensors: dict) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1].float(), -1)


def reference(folder, prompt=PROMPT, count=8) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()


async def handles(llm, tensors: dict, packed: bool = True) -> dict:
    """What a trainer sends: every tensor whole, for every device. On a CPU, handles are storages shared by file name."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    listed = [(name, reduce_tensor(tensor)) for name, tensor in tensors.items()]
    payload = base64.b64encode(bytes(ForkingPickler.dumps(listed))).decode() if packed else listed
    return dict.fromkeys(await llm.collective_rpc("report_device_id"), payload)


async def refit(llm, tensors: dict, buckets: int = 3) -> None:
    names = list(tensors)
    size = -(-len(names) // buckets)
    for at in range(0, len(names), size):
        await llm.update_weights(await handles(llm, {n: tensors[n] for n in names[at : at + size]}))
    await llm.update_weights(None)


def fp8(tensors: dict) -> dict:
    """Block-quantized projections, each scale behind its weight; the rest as it is."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor
        if name.endswith("_proj.weight"):
            blocks = tensor.float().unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            made[name] = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
            made[name + "_scale_inv"] = scale
    return made


def widened(tensors: dict) -> dict:
    """`fp8`'s tensors back in BF16."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if (scale := tensors.get(name + "_scale_inv")) is not None:
            tensor = (tensor.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).bfloat16()
        made[name] = tensor
    return made


class Extension:
    """Mixed into the workers of some tests."""

    def parameters_of(self) -> dict:
        return {n: (tuple(p.shape), str(p.dtype)) for n, p in self.engine.model_engine.model.named_parameters()}

    def digest_of(self, name: str) -> int:
        return hash(self.engine.model_engine.model.get_parameter(name).data.view(torch.uint8).numpy().tobytes())

    def latched(self) -> bool:
        return hasattr(self.engine.model_engine.model, "first_pre_reload_weights")

    def nested(self) -> None:
        with self.engine.control_action(), self.engine.control_action():
            pass

    def identity(self) -> tuple[int, int]:
        return self.rank, self.device_id


def extension() -> str:
    """Upstream's extension with `Extension` added."""
    return f"{HERE}.Both"


def __getattr__(name: str):
    if name == "Both":
        from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

        return type("Both", (WorkerExtension, Extension), {})
    if name == "Clashing":
        return type("Clashing", (), {"sleep": lambda self: None})
    raise AttributeError(name)


def unfused(tensors: dict) -> dict:
    """For transformers 5, which holds the experts of a layer in two tensors."""
    layers = {n.split(".mlp.experts.")[0] for n in tensors if ".mlp.experts." in n}
    made = {n: t for n, t in tensors.items() if ".mlp.experts." not in n}
    for at in layers:
        count = sum(n.startswith(f"{at}.mlp.experts.") and n.endswith("gate_proj.weight") for n in tensors)
        pick = lambda e, m, at=at: tensors[f"{at}.mlp.experts.{e}.{m}_proj.weight"]  # noqa: E731
        made[f"{at}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat((pick(e, "gate"), pick(e, "up"))) for e in range(count)])
        made[f"{at}.mlp.experts.down_proj"] = torch.stack([pick(e, "down") for e in range(count)])
    return made
