"""Package metadata. Exact versions live in requirements/; ranges here say what the code needs."""

from pathlib import Path

from setuptools import find_packages, setup

BASE = [
    "pydantic>=2.12",
    "pyyaml>=6",
    "omegaconf>=2.3",
    "typer>=0.16",
    "rich>=14",
    "ray>=2.50",
    "safetensors>=0.6",
    "xxhash>=3.5",
    "numpy>=2",
    "packaging>=24",
]
TRAIN = [
    "torch>=2.9",
    "megatron-core==0.16.1",
    "nvidia-modelopt>=0.44",
    "transformers>=5.5.3",
    "datasets>=4",
    "math-verify>=0.9",
    "reasoning-gym>=0.1.25",
    "matplotlib>=3.9",
    "tensorboard>=2.20",
    "psutil>=6",
]
DEV = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.150", "jsonschema>=4.20", "ruff>=0.14"]

setup(
    name="trt_rl",
    version="0.1.0",
    description="BF16 Megatron-core training and FP8 rollout engines on Ray, joined by a verified refit",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["trt_rl", "trt_rl.*", "launch", "launch.*"]),
    package_data={"launch": ["slurm/*.sbatch"]},
    python_requires=">=3.11,<3.13",
    install_requires=BASE,
    extras_require={
        "cpu": TRAIN,
        "train": [*TRAIN, "transformer-engine[pytorch]>=2.8"],
        "trtllm": ["tensorrt-llm>=1.3.0rc15", "mpi4py>=4"],
        "vllm": ["vllm>=0.24"],
        "sglang": ["sglang>=0.5.16"],
        "dev": DEV,
    },
    entry_points={"console_scripts": ["trt-rl=trt_rl.cli:app"]},
)
