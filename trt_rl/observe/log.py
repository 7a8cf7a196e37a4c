"""Where metrics go: one line a step on the console, JSONL, TensorBoard; and rollouts, a file a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

console = Console(highlight=False, soft_wrap=True, markup=False)  # user text may hold brackets


class MetricLog:
    """Writes `metrics.jsonl` and, if asked, TensorBoard event files in `folder`."""

    def __init__(self, folder: Path, tensorboard: bool, resume_after: int) -> None:
        """`resume_after`: metrics of later steps, left by a run that was cut off, are dropped."""
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_jsonl(self.path) if line["step"] <= resume_after]
        self._file = self.path.open("w")
        for line in kept:
            self._write(line)
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_after + 1)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, **metrics})
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Lines of `path`; a last line that was cut off in writing is left out, a missing file is empty."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def progress_line(step: int, steps: int, metrics: Mapping[str, float], spans: Mapping[str, float]) -> str:
    """The one line of a step: what was learned, how it was sampled, where the time went."""
    phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
    shown = [
        ("reward", "{:.3f}"),
        ("response_length", "len {:.1f}"),
        ("groups_sampled", "groups {groups_trained:.0f}/{:.0f}"),
        ("entropy", "entropy {:.3f}"),
        ("ppo_kl", "ppo_kl {:.1e}"),
        ("mismatch_kl", "mismatch_kl {:.1e}"),
        ("grad_norm", "grad {:.2f}"),
    ]
    parts = [
        form.format(metrics[name], **metrics) if " " in form else f"{name} {form.format(metrics[name])}"
        for name, form in shown
        if name in metrics
    ]
    return f"step {step}/{steps} | " + " | ".join(parts) + f" | {sum(spans.values()):.1f} s ({phases})"


def plot_progress(metrics: list[dict[str, Any]], path: Path) -> None:
    """Reward and response length over steps, with held-out accuracy where it was measured, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    trained = [m for m in metrics if "reward" in m]
    checked = [m for m in metrics if "validation_accuracy" in m]
    top.plot([m["step"] for m in trained], [m["reward"] for m in trained], label="training reward, all sampled groups")
    top.plot([m["step"] for m in checked], [m["validation_accuracy"] for m in checked], "o-", label="held-out accuracy, greedy")
    top.set_ylabel("reward / accuracy")
    top.legend()
    bottom.plot([m["step"] for m in trained], [m["response_length"] for m in trained])
    bottom.set(ylabel="response length [tokens]", xlabel="step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
