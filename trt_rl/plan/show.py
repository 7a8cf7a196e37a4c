"""A plan as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trt_rl.plan.report import Plan


def show_plan(plan: Plan, console: Console) -> None:
    if plan.cluster:
        console.print(_cluster(plan))
        console.print(_refit(plan))
    if plan.memory_gib:
        console.print(_memory(plan))
    if plan.projection:
        console.print(_projection(plan.projection))
    for note in plan.notes:
        console.print(Text(f"note: {note}", "yellow"))
    if plan.violations:
        console.print(Text(f"{plan.name} cannot run as it is: {len(plan.violations)} problem(s)", "bold red"))
        for line in plan.violations:
            console.print(Text(f"  - {line}"))
    else:
        console.print("nothing found that would stop this recipe")


def _pairs(title: str, rows: list[tuple[str, Any]]) -> Table:
    table = Table("", "", show_header=False, title=title, title_justify="left", min_width=60)
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def _cluster(plan: Plan) -> Table:
    cluster, counts = plan.cluster, plan.parameters
    of = f" of {cluster['gpus_per_node']} {cluster['gpu']}" if cluster["gpus_per_node"] else ""
    rows = [("GPUs" if of else "ranks in all", f"{cluster['gpus']} on {cluster['nodes']} node(s){of}")]
    lines = [
        f"node {n}: " + ", ".join(f"{side} {ranks}" for side, ranks in its.items() if ranks)
        for n, its in enumerate(cluster["ranks_by_node"])
    ]
    rows.append(("ranks", "\n".join(lines[:8] + ([f"... {len(lines) - 8} more nodes"] if len(lines) > 8 else []))))
    crossing = ", ".join(f"{name} over {nodes} nodes" for name, nodes in cluster["groups_crossing_nodes"].items())
    rows.append(("groups across nodes", crossing or "none"))
    model = counts["model"]
    rows.append(("parameters", f"{model['total']:,} ({model['active']:,} active, {model['experts']:,} in experts)"))
    rows.append(("of a trainer rank", " | ".join(f"{stage['total']:,}" for stage in counts["trainer_rank_of_stage"][:4])))
    return _pairs(f"{plan.name}: layout", rows)


def _memory(plan: Plan) -> Table:
    memory = plan.memory_gib
    trainer, engine = memory["trainer"], memory["engine"]
    table = Table("", "trainer rank", "engine rank", title=f"GiB of a GPU's {memory['of_a_gpu']} (estimate)", title_justify="left")
    for name in ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "refit_buffers", "overhead", "total"):
        cells = [f"{side[name]:.2f}" if name in side else "" for side in (trainer, engine)]
        table.add_row(name.replace("_", " "), *cells, style="bold" if name == "total" else None)
    table.caption = f"a replica's KV cache holds {engine['sequences']} sequences of full length"
    if together := memory.get("colocated"):
        table.caption += f"; colocated, generating: {together['generating']} GiB"
    return table


def _refit(plan: Plan) -> Table:
    refit = plan.refit
    links = list(refit["bytes_by_link"].items())
    shown = "\n".join(f"{link}: {n / 1e9:.3f} GB" for link, n in links[:8]) + (f"\n... {len(links) - 8} more" if len(links) > 8 else "")
    rows = [
        ("format", f"{refit['format']}: {refit['precision']}"),
        ("layouts", f"trainer {refit['trainer']} -> engine {refit['engine']}"),
        (
            "sent by the trainer",
            f"{refit['bytes_sent_by_trainer'] / 1e9:.3f} GB, busiest rank {refit['bytes_of_busiest_trainer_rank'] / 1e9:.3f} GB",
        ),
        ("inside / between nodes", f"{refit['bytes_inside_nodes'] / 1e9:.3f} / {refit['bytes_between_nodes'] / 1e9:.3f} GB"),
        ("by link", shown),
        (
            "buckets",
            f"{refit['buckets']} in {refit['rounds']} rounds" if refit["exact"] else "bytes extrapolated from a few layers and experts",
        ),
        ("extra memory of a rank", f"{max(refit['extra_bytes_of_rank'].values()) / 1e9:.3f} GB at most (two buckets)"),
        ("seconds", f"{refit['predicted_s']:.3f} (prediction from link speeds)"),
    ]
    return _pairs("refit", rows)


def _projection(projection: dict[str, Any]) -> Table:
    rows = [(name.replace("_", " "), value) for name, value in projection.items() if name not in ("labelled", "assumed")]
    rows.append(("assumed", ", ".join(f"{k} {v:g}" for k, v in projection["assumed"].items())))
    return _pairs("one step: projected, not measured", rows)
