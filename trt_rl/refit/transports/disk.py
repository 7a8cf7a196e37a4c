"""Buckets as files, for engines that can only read files and for cold starts: slow, universal, inspectable.

`FOLDER/v00000007/` holds one safetensors file a bucket, with every slice under its Hugging Face name and box and all
digests in the file's metadata, and one manifest a trainer rank, written last. Files appear under their names only when
they are complete. Two versions are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trt_rl.errors import RefitError
from trt_rl.refit.route import Route, Slice
from trt_rl.refit.slot import Slot
from trt_rl.refit.transports.link import Exchange, Link, Meeting, Transfer

_POLL_S = 0.02


class DiskLink(Link):
    def __init__(self, meeting: Meeting, member: int, route: Route) -> None:
        if not meeting.folder:
            raise RefitError("refit.transport = disk needs a folder that every process can reach; set run.folder to one")
        self.meeting, self.member, self.route, self.device = meeting, member, route, torch.device("cpu")
        self.root = Path(meeting.folder)
        self.root.mkdir(parents=True, exist_ok=True)
        if member == 0:  # all join before the first version is written: what is here is of an earlier group or run
            self._keep(0)

    def _keep(self, versions: int) -> None:
        found = sorted(self.root.glob("v" + "[0-9]" * 8))
        for old in found[: len(found) - versions]:
            shutil.rmtree(old, ignore_errors=True)

    def begin(self, refit) -> None:
        self.version, self._written = refit.version, {}
        self.folder = self.root / f"v{refit.version:08d}"
        if self.member < self.meeting.trainers:
            self.folder.mkdir(exist_ok=True)

    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        if send and send.bucket not in self._written:  # one file serves every engine
            self._write(Slot(self.route.buckets[send.bucket], send.payload))
        return _Reading(self, receive)

    def _write(self, slot: Slot) -> None:
        path, number = self.path(slot.plan.number), slot.plan.number
        temporary = path.with_suffix(f".tmp{self.member}")
        digests = dict(zip(map(_key, slot.plan.slices), slot.digests.tolist(), strict=True))
        about = {"header": json.dumps(slot.header.tolist()), "digests": json.dumps(digests)}
        try:
            save_file({_key(part): slot.tensor(part).contiguous() for part in slot.plan.slices}, temporary, metadata=about)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise RefitError(f"{path} cannot be written: {error}; a refit through disk needs room in run.folder") from error
        self._written[number] = digests
        self.sent_bytes += slot.payload.numel()

    def path(self, bucket: int) -> Path:
        return self.folder / f"bucket{bucket:06d}.safetensors"

    def end(self) -> None:
        if self.member >= self.meeting.trainers:
            return
        manifest = self.folder / f"rank{self.member:05d}.json"
        temporary = manifest.with_suffix(".tmp")
        files = {self.path(number).name: digests for number, digests in self._written.items()}
        temporary.write_text(json.dumps({"version": self.version, "trainer_rank": self.member, "files": files}))
        os.replace(temporary, manifest)
        if self.member == 0:
            self._keep(2)

    def close(self) -> None:
        pass


class _Reading(Exchange):
    def __init__(self, link: DiskLink, receive: Transfer | None) -> None:
        self.link, self.receive = link, receive

    def received(self) -> torch.Tensor:
        payload, sender, number = self.receive
        path, patience = self.link.path(number), self.link.meeting.timeout_s
        deadline = time.monotonic() + patience
        while not path.is_file():
            if time.monotonic() > deadline:
                raise RefitError(f"{path} from {self.link.meeting.name(sender)} did not appear within {patience:.0f} s")
            time.sleep(_POLL_S)
        slot = Slot(self.link.route.buckets[number], payload)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                digests = json.loads(about["digests"])
                for part in slot.plan.slices:
                    slot.tensor(part).copy_(file.get_tensor(_key(part)))
                slot.digests.copy_(torch.tensor([digests[_key(part)] for part in slot.plan.slices]))
                slot.header.copy_(torch.tensor(json.loads(about["header"])))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RefitError(f"{path} does not hold {slot.plan.where} of this route: {error}") from error
        return payload

    def sent(self) -> None:
        pass


def _key(part: Slice) -> str:
    return f"{part.name}[{','.join(f'{start}:{stop}' for start, stop in part.box)}]"
