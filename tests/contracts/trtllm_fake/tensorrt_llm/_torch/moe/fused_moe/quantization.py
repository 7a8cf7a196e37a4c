"""`tensorrt_llm._torch.moe.fused_moe.quantization`."""

from tensorrt_llm import _family

_family.only_in(__name__, _family.NEW_LAYOUT)
from tensorrt_llm._fake_moe import (  # noqa: E402
    DeepSeekFP8BlockScalesFusedMoEMethod,
    DeepSeekFP8BlockScalesFusedMoEMethodDeepGemm,
    FP8QDQFusedMoEMethod,
    FusedMoEMethodBase,
    UnquantizedFusedMoEMethod,
)

__all__ = [
    "DeepSeekFP8BlockScalesFusedMoEMethod",
    "DeepSeekFP8BlockScalesFusedMoEMethodDeepGemm",
    "FP8QDQFusedMoEMethod",
    "FusedMoEMethodBase",
    "UnquantizedFusedMoEMethod",
]
