"""What a Qwen3 `config.json` says, checked once: sizes, Hugging Face tensor names and shapes, layout limits.

No torch. Covers `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` as transformers writes them
(transformers/models/qwen3/configuration_qwen3.py and qwen3_moe).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trt_rl.errors import ModelError
from trt_rl.layout import Layout, divisors

SUPPORTED = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Arch:
    """Sizes of one Qwen3 model. `experts == 0` means dense; `moe_layers` are the layers that hold experts."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float
    rms_eps: float
    max_positions: int
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    norm_topk: bool = True
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: str | Path) -> Arch:
        """Read `folder/config.json`.

        Raises:
            ModelError: the file is missing, is not JSON, or describes something other than Qwen3.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelError(f"model.path: {path} does not exist; give a folder with config.json and *.safetensors")
        try:
            raw = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> Arch:
        kind = raw.get("model_type")
        if kind not in SUPPORTED:
            raise ModelError(f"{where}: model_type is {kind!r}; trt_rl trains {' and '.join(SUPPORTED)}")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        problems = []
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            problems.append(f"rope type {rope.get('rope_type', rope.get('type'))!r} (only 'default' is trained)")
        if raw.get("attention_bias"):
            problems.append("attention_bias: true")
        if raw.get("use_sliding_window"):
            problems.append("use_sliding_window: true")
        if raw.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act {raw['hidden_act']!r} (Qwen3 uses 'silu')")
        if problems:
            raise ModelError(f"{where}: not supported: {'; '.join(problems)}")
        try:
            layers = raw["num_hidden_layers"]
            moe = kind == "qwen3_moe"
            every, dense_only = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
            return cls(
                model_type=kind,
                hidden=raw["hidden_size"],
                layers=layers,
                heads=raw["num_attention_heads"],
                kv_heads=raw["num_key_value_heads"],
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                ffn=raw["intermediate_size"],
                vocab=raw["vocab_size"],
                tied=bool(raw.get("tie_word_embeddings", False)),
                rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta", 10000.0)),
                rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
                max_positions=raw["max_position_embeddings"],
                experts=(raw.get("num_experts") or raw["num_local_experts"]) if moe else 0,
                experts_per_token=raw["num_experts_per_tok"] if moe else 0,
                moe_ffn=raw["moe_intermediate_size"] if moe else 0,
                norm_topk=bool(raw.get("norm_topk_prob", False)) if moe else True,
                moe_layers=tuple(i for i in range(layers) if i not in dense_only and (i + 1) % every == 0) if moe else (),
            )
        except KeyError as error:
            raise ModelError(f"{where}: key {error} is missing; a {kind} config.json has it") from error

    @property
    def fingerprint(self) -> str:
        """Short digest of all sizes: two checkpoints are of one model only if it agrees."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows that Megatron allocates: a multiple of 128 per tensor-parallel rank."""
        unit = 128 * tp
        return -(-self.vocab // unit) * unit

    def shrunk(self, layers: int, experts: int) -> Arch:
        """The same widths with fewer layers, and with fewer experts where there are any."""
        moe = tuple(i for i in self.moe_layers if i < layers) or ((layers - 1,) if self.moe_layers else ())
        return replace(self, layers=layers, experts=experts if self.experts else 0, moe_layers=moe)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the Hugging Face checkpoint with its shape, in the checkpoint's order."""
        return dict(self._hf_tensors())

    def parameters(self) -> int:
        total = 0
        for shape in self.hf_shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def _hf_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, d = self.hidden, self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, h)
        for i in range(self.layers):
            at = f"model.layers.{i}"
            yield f"{at}.input_layernorm.weight", (h,)
            yield f"{at}.self_attn.q_proj.weight", (self.heads * d, h)
            yield f"{at}.self_attn.k_proj.weight", (self.kv_heads * d, h)
            yield f"{at}.self_attn.v_proj.weight", (self.kv_heads * d, h)
            yield f"{at}.self_attn.o_proj.weight", (h, self.heads * d)
            yield f"{at}.self_attn.q_norm.weight", (d,)
            yield f"{at}.self_attn.k_norm.weight", (d,)
            yield f"{at}.post_attention_layernorm.weight", (h,)
            if i in self.moe_layers:
                yield f"{at}.mlp.gate.weight", (self.experts, h)
                for e in range(self.experts):
                    yield from _mlp(f"{at}.mlp.experts.{e}", h, self.moe_ffn)
            else:
                yield from _mlp(f"{at}.mlp", h, self.ffn)
        yield "model.norm.weight", (h,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, h)

    def layout_violations(self, layout: Layout) -> list[str]:
        """Every reason why this model cannot be trained in `layout`, with the values that would work."""
        found = []

        def must_divide(key: str, size: int, what: str, total: int) -> None:
            if total % size:
                works = ", ".join(map(str, divisors(total)))
                found.append(f"trainer.parallel.{key} = {size} does not divide the model's {total} {what}; works: {works}")

        must_divide("tp", layout.tp, "attention heads", self.heads)
        must_divide("tp", layout.tp, "KV heads", self.kv_heads)
        must_divide("pp", layout.pp, "layers", self.layers)
        if len(self.moe_layers) < self.layers:
            must_divide("tp", layout.tp, "MLP columns (intermediate_size)", self.ffn)
        if self.experts:
            must_divide("ep", layout.ep, "experts", self.experts)
            must_divide("etp", layout.etp, "expert columns (moe_intermediate_size)", self.moe_ffn)
            if layout.ep == 1 and layout.etp != layout.tp:
                # Megatron-core 0.16.1 reduces expert gradients over their own replicas only when ep > 1.
                found.append(f"trainer.parallel.etp = {layout.etp} must equal tp = {layout.tp} while ep = 1; leave etp out or set ep > 1")
        elif layout.ep > 1:
            found.append(f"trainer.parallel.ep = {layout.ep}: a dense model has no experts; set it to 1")
        return found


def _mlp(at: str, hidden: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (ffn, hidden)
    yield f"{at}.up_proj.weight", (ffn, hidden)
    yield f"{at}.down_proj.weight", (hidden, ffn)
