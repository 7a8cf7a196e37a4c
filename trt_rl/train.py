"""The synchronous driver: generate, reward, advantage, train, refit."""

from __future__ import annotations

from typing import Any

from trt_rl.config import Recipe
from trt_rl.observe.span import span
from trt_rl.run import Run
from trt_rl.samples import correct, sampling_metrics, training_batch


def train(recipe: Recipe, resume: bool = False, overwrite: bool = False, resume_or_start: bool = False) -> dict[str, Any]:
    """Run `recipe` to its end, or until the first interrupt, and return the summary.

    Raises:
        TrtRlError: anything the user can mend; the message says how.
    """
    with Run(recipe, resume, overwrite, resume_or_start) as run:
        run.refit()
        run.validate_at_start()

        while run.continues():
            step = run.step + 1
            groups, sampled = run.sampler.training_groups(run.prompts, step)
            run.rest_engines()

            batch = training_batch(recipe, groups)
            with span("logprobs"):
                old_logp = run.trainer.logprobs(batch)
            batch, mismatch = correct(recipe, batch, old_logp)

            with span("train"):
                metrics = run.trainer.train(batch)
            run.step = step
            run.refit()

            metrics |= mismatch | sampling_metrics(groups, sampled)
            run.finish_step(metrics, sampled)

        return run.finish()
