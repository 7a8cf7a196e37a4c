"""A stand-in for SGLang 0.5.16: what an RL framework calls of it, with its signatures, answers and refusals.

Written from the wheel's source. One scheduler process a tensor-parallel rank, as there; with one rank it generates, on a CPU,
with the embedded engine's model code and weights that are held in SGLang's fused parameters. What the real package does to a
scheduler that meets a failed assertion or an error of a weight loader happens here too: the process ends and the parent gets
SIGQUIT.
"""

from sglang.srt.entrypoints.engine import Engine as Engine

__version__ = "0.5.16"
