"""Imported once by the process that every CPU rank of `ranks.Pool` is forked from."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from trt_rl.trainer import cpu

cpu.install()

import modelopt.torch.quantization  # noqa: F401  first imported inside a refit otherwise

import trt_rl.trainer.rank  # noqa: F401

gc.collect()
gc.freeze()  # or the collector of every forked process would touch, and so copy, all of it
