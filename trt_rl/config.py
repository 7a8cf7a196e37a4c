"""The recipe: one typed tree of everything a run needs. Torch-free, so that mistakes surface in a second.

Defaults here < YAML file < dotted overrides (`trainer.parallel.tp=2`, OmegaConf syntax). Unknown keys are
errors that name the nearest valid key. `trainer.megatron` and `rollout.<engine>` pass through under the
library's own names, minus the keys that trt_rl sets itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_rl.errors import RecipeError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.precision import PrecisionPolicy
from trt_rl.rollout.capabilities import CAPABILITIES

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class RunSettings(Section):
    folder: str = "runs/{name}"
    """Where everything of the run goes; `{name}` is the recipe's name."""
    steps: Positive = 100
    """Training steps: generate, reward, train, refit."""
    validate_every: Count = 0
    """Validate after every so many steps; 0 validates before the first and after the last step only."""
    save_every: Count = 0
    """Checkpoint after every so many steps; 0 saves at the end only."""
    keep_checkpoints: Positive = 2
    """Older checkpoints are deleted once a newer one is complete."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for any part of the run to answer one call; then the run ends with an error that names the part."""
    save_hf: bool = True
    """At the end, write the trained weights to `<folder>/model`, a Hugging Face folder."""
    tensorboard: bool = True
    """Write event files to `<folder>/tensorboard`."""


class ModelSettings(Section):
    path: str
    """Hugging Face folder: config.json, safetensors, tokenizer. Qwen3 dense or MoE."""
    tokenizer: str | None = None
    """Folder of the tokenizer if it is not `path`."""


class Source(Section):
    source: str
    """A .jsonl or .parquet file, or a function `module:name` that returns rows (dicts)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


class DataSettings(Section):
    train: Source
    validation: Source | None = None
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages for the tokenizer's chat template."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are dropped, counted and reported."""
    shuffle: bool = True


class RewardSettings(Section):
    function: str
    """`module:name` of `score(response: str, row: dict, **args) -> float`."""
    args: dict[str, Any] = {}
    workers: Positive = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A call that takes longer costs its sample."""


class SamplingSettings(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    """0 keeps all tokens."""
    max_tokens: Positive = 1024


class EngineParallel(Section):
    tp: Positive = 1
    """Ranks of one replica."""
    ep: Positive = 1
    """Ways in which experts are divided among those ranks; each expert is cut tp/ep ways."""
    pp: Positive = 1
    """1: engines have no pipeline stages; the plan says what to use instead."""


class RolloutSettings(Section):
    engine: Literal["trtllm", "vllm", "sglang", "hf"] = "hf"
    """The only key that changes to switch engines; each has a dict of its own options below."""
    colocated: bool = False
    """Engines live on the trainer's GPUs and sleep while it works; needs refit.transport ipc or auto."""
    replicas: Positive = 1
    parallel: EngineParallel = EngineParallel()
    prompts_per_step: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples per prompt."""
    sampling: SamplingSettings = SamplingSettings()
    validation: SamplingSettings | None = None
    """Sampling for validation; greedy with the training `max_tokens` if left out."""
    stop_token_ids: list[Count] = []
    """Stop tokens besides the tokenizer's end-of-sequence token."""
    hf: dict[str, Any] = {}
    """Options of `trt_rl.rollout.hf.HFEngine`, e.g. max_batch."""
    vllm: dict[str, Any] = {}
    """Fields of vLLM's AsyncEngineArgs, e.g. gpu_memory_utilization."""
    trtllm: dict[str, Any] = {}
    """Fields of TensorRT-LLM's TorchLlmArgs, e.g. kv_cache_config."""
    sglang: dict[str, Any] = {}
    """Fields of SGLang's ServerArgs, e.g. mem_fraction_static."""

    def layout(self) -> EngineLayout:
        """Of all replicas, as a refit sees them."""
        return EngineLayout(self.parallel.tp, self.parallel.ep, self.replicas, CAPABILITIES[self.engine].whole_tensors)


class DynamicSampling(Section):
    enabled: bool = False
    """Replace groups whose rewards are all equal, until exactly `rollout.prompts_per_step` groups carry a signal."""
    max_rounds: Positive = 10
    """Generation rounds per step, the first included."""
    on_shortfall: Literal["stop", "train"] = "stop"
    """After the last round: end the run with an error, or train on the groups there are and report how many."""


class Overlong(Section):
    enabled: bool = False
    buffer_tokens: Positive = 4096
    """The penalty grows linearly over the last `buffer_tokens` of `rollout.sampling.max_tokens`."""
    penalty: Annotated[float, Field(gt=0)] = 1.0


class ImportanceCorrection(Section):
    enabled: Literal["auto", True, False] = "auto"
    """`auto`: on when the engine holds FP8 weights."""
    cap: Annotated[float, Field(gt=0)] = 2.0


class AlgoSettings(Section):
    normalize_std: bool = True
    """GRPO advantages are divided by the group's standard deviation; false is Dr. GRPO."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()
    tis: ImportanceCorrection = ImportanceCorrection()


class Parallel(Section):
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive | None = None
    """Tensor parallelism inside experts; `tp` if left out, as in Megatron."""
    dp: Positive = 1

    def layout(self) -> Layout:
        return Layout(**(self.model_dump() | {"etp": self.etp or self.tp}))


class OptimizerSettings(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Count = 0
    decay: Literal["constant", "cosine", "linear"] = "constant"
    decay_steps: Positive | None = None
    """Updates until `min_lr`; the whole run if left out."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0


class TrainerSettings(Section):
    parallel: Parallel = Parallel()
    precision: Literal["bf16", "fp32"] = "bf16"
    mini_batches: Positive = 1
    """Optimizer updates per step."""
    microbatch_tokens: Positive = 8192
    """Padded tokens that one forward pass may hold; a longer sample travels alone."""
    logprob_chunk: Positive = 1024
    """Tokens whose logits are FP32 at once."""
    optimizer: OptimizerSettings = OptimizerSettings()
    offload: list[Literal["gradients", "optimizer"]] = []
    """What leaves the GPU while engines generate there: optimizer states for host memory, gradients for good, because the next
    step makes new ones. With `rollout.colocated`."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron-core's TransformerConfig, e.g. recompute_granularity."""


class RefitSettings(Section):
    format: Literal["bf16", "fp8_block", "fp8_per_tensor"] = "fp8_block"
    """Linear weights of the engine; embeddings, norms, router and lm_head stay BF16."""
    exclude: list[str] = []
    """ModelOpt wildcard patterns over Hugging Face modules or tensors that stay BF16, e.g. `model.layers.0.*`."""
    bf16_first_layers: Count = 0
    bf16_last_layers: Count = 0
    bf16_attention: bool = False
    transport: Literal["auto", "gloo", "nccl", "ipc", "disk"] = "auto"
    """`auto`: nccl where trainer and engines have GPUs, gloo where they have none. `ipc` is for engines that share GPUs
    with the trainer on one node."""
    verify: Literal["full", "sample", "off"] = "full"
    """Compare the engine's live tensors with what was sent: all, all of the first refit and a rotating sixteenth
    after, or none."""
    delta: bool = False
    """Send only what changed since the refit before, by digest. Exact."""
    calibration_prompts: Positive = 64
    """Prompts of the training data on which fp8_per_tensor calibrates activations before the first refit."""
    bucket_mib: Positive = 256
    timeout_s: Annotated[float, Field(gt=0)] = 300.0

    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy(self.format, tuple(self.exclude), self.bf16_first_layers, self.bf16_last_layers, self.bf16_attention)


class ClusterSettings(Section):
    """What a run is planned and launched for; a run itself takes what Ray has."""

    nodes: Positive | None = None
    """As many as the layouts need, if left out."""
    gpus_per_node: Count = 8
    """0 runs on CPUs."""
    gpu: Literal["a100", "h100", "h200", "b200", "gb200"] = "h200"


class Recipe(Section):
    name: str
    seed: Count = 1
    model: ModelSettings
    data: DataSettings
    reward: RewardSettings
    rollout: RolloutSettings = RolloutSettings()
    algo: AlgoSettings = AlgoSettings()
    trainer: TrainerSettings = TrainerSettings()
    refit: RefitSettings = RefitSettings()
    cluster: ClusterSettings = ClusterSettings()
    run: RunSettings = RunSettings()

    @property
    def folder(self) -> Path:
        return Path(self.run.folder.replace("{name}", self.name))

    @property
    def correct_importance(self) -> bool:
        enabled = self.algo.tis.enabled
        return self.refit.format != "bf16" if enabled == "auto" else bool(enabled)

    @property
    def validation_sampling(self) -> SamplingSettings:
        greedy = SamplingSettings(temperature=0.0, max_tokens=self.rollout.sampling.max_tokens)
        return self.rollout.validation or greedy


# Keys of the pass-through dicts that trt_rl derives from the rest of the recipe.
OWNED_MEGATRON = {
    "tensor_model_parallel_size": "trainer.parallel.tp",
    "pipeline_model_parallel_size": "trainer.parallel.pp",
    "virtual_pipeline_model_parallel_size": "trainer.parallel.pp",
    "context_parallel_size": "trainer.parallel.cp",
    "expert_model_parallel_size": "trainer.parallel.ep",
    "expert_tensor_parallel_size": "trainer.parallel.etp",
    "sequence_parallel": "trainer.parallel.tp (on whenever tp > 1)",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
    "params_dtype": "trainer.precision",
    "autocast_dtype": "trainer.precision",
    "enable_autocast": "trainer.precision",
    "calculate_per_token_loss": "nothing: token weights already make the loss a mean over the global batch",
    "perform_initialization": "nothing: it also marks tensor-parallel parameters",
    "variable_seq_lengths": "trainer.parallel.pp",
    "moe_router_pre_softmax": "model.path (config.json)",
    "layernorm_zero_centered_gamma": "nothing: it changes what a norm's weight means",
    **dict.fromkeys(
        ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
         "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        "trainer.parallel.pp (stages hold equal numbers of layers)",
    ),
    "pipeline_dtype": "trainer.precision",
    **dict.fromkeys(
        ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
         "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "normalization",
         "layernorm_epsilon", "qk_layernorm", "gated_linear_unit", "activation_func", "add_bias_linear"),
        "model.path (config.json)",
    ),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "nothing: dropout would make old and new log-probs differ"),
}  # fmt: skip
OWNED_ENGINE = {
    "hf": {"arch": "model.path", "table": "refit", "layout": "rollout.parallel", "dtype": "refit.format"},
    "vllm": {
        **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init"), "model.path (engines take and give token ids)"),
        **dict.fromkeys(("tensor_parallel_size", "enable_expert_parallel"), "rollout.parallel"),
        **dict.fromkeys(("quantization", "load_format", "dtype"), "refit.format (weights come with the first refit)"),
        **dict.fromkeys(("generation_config", "logprobs_mode"), "rollout.sampling"),
        **dict.fromkeys(("worker_extension_cls", "disable_log_stats"), "nothing: the adapter needs it so"),
        "enable_sleep_mode": "rollout.colocated",
    },
    "trtllm": {
        **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init"), "model.path (engines take and give token ids)"),
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size"), "rollout.parallel"
        ),
        **dict.fromkeys(("load_format", "dtype"), "refit.format (weights come with the first refit)"),
        **dict.fromkeys(
            ("orchestrator_type", "ray_worker_extension_cls", "ray_placement_config", "placement_groups", "placement_bundle_indices"),
            "nothing: the adapter needs it so",
        ),
        "per_worker_gpu_share": "rollout.colocated",
        **dict.fromkeys(("enable_sleep", "sleep_config", "sleep"), "rollout.colocated"),
        "allreduce_strategy": "nothing: the default fails with several engines under Ray; NCCL is set",
        "torch_compile_config": "nothing: compiled modules have other names, and a refit would load nothing",
        "max_input_len": "rollout.trtllm.max_seq_len",
    },
    "sglang": {
        **dict.fromkeys(("model_path", "tokenizer_path", "skip_tokenizer_init"), "model.path (engines take and give token ids)"),
        **dict.fromkeys(
            (
                "tp_size",
                "ep_size",
                "dp_size",
                "pp_size",
                "dcp_size",
                "attn_cp_size",
                "moe_dp_size",
                "moe_dense_tp_size",
                "enable_dp_attention",
                "enable_dp_lm_head",
                "nnodes",
                "node_rank",
            ),
            "rollout.parallel",
        ),
        **dict.fromkeys(("quantization", "load_format", "dtype"), "refit.format (weights come with the first refit)"),
        **dict.fromkeys(("enable_memory_saver", "sleep"), "rollout.colocated"),
        "sampling_defaults": "rollout.sampling",
        **dict.fromkeys(
            (
                "speculative_algorithm",
                "enable_lora",
                "enable_eplb",
                "ep_num_redundant_experts",
                "init_expert_location",
                "cpu_offload_gb",
                "offload_group_size",
            ),
            "nothing: a refit writes the model's own weights, where they are",
        ),
    },
}


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and apply dotted overrides.

    Raises:
        RecipeError: the file is missing or not YAML, an override is malformed, or any key or value is wrong;
            all of them are listed in one message.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path} does not exist; recipes are YAML files such as examples/quickstart/recipe.yaml")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise RecipeError(f"{path} is not a mapping of keys to values, as a recipe is")
        tree = OmegaConf.merge(loaded, OmegaConf.from_dotlist(overrides or []))
        plain = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise RecipeError(f"{path}: {error}") from error
    return parse_recipe(plain, str(path))


def parse_recipe(tree: Any, where: str = "recipe") -> Recipe:
    """Validate a plain dict. See `load_recipe`."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise RecipeError(f"{where} has {len(lines)} error(s):\n" + "\n".join(f"  - {line}" for line in lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; reading it back gives an equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.create(recipe.model_dump(mode="json")))


def valid_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key a recipe may have; sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = next((t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if inner is not None:
            yield from valid_keys(inner, f"{prefix}{name}.")


def _types(annotation: Any) -> tuple:
    return (annotation, *getattr(annotation, "__args__", ()))


def _explain(item: dict) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(key)}"
    if item["type"] == "missing":
        return f"{key}: required key is missing"
    return f"{key} = {item['input']!r}: {item['msg']}"


def _nearest(key: str) -> str:
    keys = list(valid_keys())
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        # The right name in the wrong section.
        near = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""
