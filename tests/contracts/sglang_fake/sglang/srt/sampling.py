"""SGLang's sampling (sglang/srt/layers/sampler.py, its pytorch backend): what it draws, and which log-probs it tells."""

from __future__ import annotations

from typing import Any

import torch


def sample(reqs: list[Any], logits: torch.Tensor, deterministic: bool):
    """(request, token, log-prob before truncation, log-prob after it) of each row.

    Top-k and top-p look at the same probabilities, both at once. Seeds are read in deterministic mode only; a draw follows
    from the seed and the position. A seed beyond 64 signed bits ends the scheduler, also where seeds are not read.
    """
    torch.tensor([req.obj.sampling_params.get("sampling_seed", 42) for req in reqs], dtype=torch.int64)
    for req, row in zip(reqs, logits.float(), strict=True):
        params = req.obj.sampling_params
        temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
        if temperature < 1e-6:
            temperature, top_k = 1.0, 1
        logp = torch.log_softmax(row / temperature, -1)
        values, order = logp.sort(descending=True)
        before = values.exp().cumsum(-1) - values.exp()
        kept = before <= params.get("top_p", 1.0)
        kept &= torch.arange(len(values)) < (top_k if top_k > 0 else len(values))
        generator = None
        if deterministic:
            generator = torch.Generator().manual_seed(hash((params.get("sampling_seed", 42), len(req.ids))) % (1 << 62))
        noise = -torch.log(-torch.log(torch.rand(len(values), generator=generator, dtype=torch.float64)))
        at = int(torch.where(kept, values.double() + noise, -torch.inf).argmax()) if int(kept.sum()) > 1 else 0
        whole = torch.logsumexp(values[kept], 0)
        yield req, int(order[at]), float(values[at]), float(values[at] - whole)
