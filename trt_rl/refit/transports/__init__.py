"""Ways to move buckets between members: `gloo`, `nccl`, `ipc`, `disk`. Each is imported only when a recipe names it."""

from __future__ import annotations

from trt_rl.dotted import load_registered
from trt_rl.errors import RefitError
from trt_rl.refit.route import Route
from trt_rl.refit.transports.link import Link, Meeting

TRANSPORTS = {
    "gloo": "trt_rl.refit.transports.gloo:GlooLink",
    "nccl": "trt_rl.refit.transports.nccl:NcclLink",
    "ipc": "trt_rl.refit.transports.ipc:IpcLink",
    "disk": "trt_rl.refit.transports.disk:DiskLink",
}


def open_link(name: str, meeting: Meeting, member: int, route: Route) -> Link:
    """Join the group that `meeting` describes. Collective: every member must arrive.

    Raises:
        RefitError: the name is unknown, or its module cannot be imported here.
    """
    return load_registered(TRANSPORTS, name, "refit.transport", "transports", RefitError)(meeting, member, route)
