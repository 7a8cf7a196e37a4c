"""Imported once by the process that every CPU rank of `ranks.Pool` is forked from: everything a rank needs, in the right order."""

import gc
import os
from importlib import import_module

os.environ["OMP_NUM_THREADS"] = "1"
import_module("torch").set_num_threads(1)
import_module("trt_rl.trainer.cpu").install()  # before megatron
import_module("modelopt.torch.quantization")  # inside a refit otherwise
import_module("trt_rl.trainer.rank")
gc.collect()
gc.freeze()  # or the collector of every forked process would touch, and so copy, all of it
