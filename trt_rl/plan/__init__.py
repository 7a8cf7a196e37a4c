"""What can be known of a recipe before a process starts: `checks` refuses what cannot run, the rest says what a run will take."""

from trt_rl.plan.checks import check, refit_plan

__all__ = ["check", "refit_plan"]
