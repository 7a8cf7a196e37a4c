"""What benchmarks and tests add to vLLM's workers, beside the refit."""

from __future__ import annotations

import time

import torch

from trt_rl.rollout.vllm_worker import RefitExtension


class MeasuredExtension(RefitExtension):
    def trt_rl_checksums(self) -> dict[str, int]:
        """Sum of each live parameter's bytes weighted by place: to compare with an engine that loaded by itself."""
        found = {}
        for name, parameter in self.get_model().named_parameters():
            raw = parameter.detach().flatten().contiguous().view(torch.uint8).long()
            found[name] = int((raw * (torch.arange(raw.numel(), device=raw.device) % 65521 + 1)).sum())
        return found

    def trt_rl_own_loader(self) -> float:
        """Seconds that vLLM's own `reload_weights` takes for the weights it holds, given under Hugging Face names from this
        GPU's memory: no transport and no quantization, so it is what a loader costs beside them. One rank only."""
        target = self._trt_rl_member.target
        places = getattr(target, "landings", target).places  # a GPU's form wraps the plain one
        held = {name: place.view.clone() for name, place in places.items()}
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(held.items()))
        torch.cuda.synchronize()
        return time.perf_counter() - started
