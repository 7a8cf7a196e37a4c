"""What a launch mounts in its containers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch.containers import Container
from launch.hosts import LaunchError
from tests.cpu.test_launch import IMAGE, JOB, QUICKSTART, ROOT, cli


def test_what_the_run_reads_is_mounted(tmp_path):
    """A model as in Hugging Face's cache, a data file, and a folder inside the working folder that is a link."""
    shared, work = tmp_path / "shared", tmp_path / "work"
    for folder in (shared / "snapshots/rev", shared / "linked", work / "inside"):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples/quickstart/model", shared / "blobs")
    for file in (shared / "blobs").iterdir():
        (shared / "snapshots/rev" / file.name).symlink_to(f"../../blobs/{file.name}")
    (shared / "rows.jsonl").touch()
    (work / "linked").symlink_to(shared / "linked")
    reads = [shared / "snapshots/rev", shared / "rows.jsonl", work / "inside", work / "linked", Path("/only/in/the/image")]
    box = Container("apptainer", "docker://img", ("/a:/b",), inputs=tuple(map(str, reads)))
    binds = [word for word in replace(JOB, workdir=work, container=box)._box.command(False) if word.startswith("--bind=")]
    same = [work, JOB.launch_folder.parent, shared / "snapshots/rev", shared / "blobs", shared / "rows.jsonl", shared / "linked"]
    assert binds == [*(f"--bind={path}:{path}" for path in same), "--bind=/a:/b"]
    done = cli("slurm", str(QUICKSTART), "--gpus-per-node=0", "--container=pyxis", "--image=i", "--dry-run", f"model.path={shared}/snapshots/rev",
               f"data.train.source={shared}/rows.jsonl", f"run.folder={tmp_path}/run", "--env=A=1", NCCL_DEBUG="WARN")  # fmt: skip
    assert "NCCL_DEBUG,A'" in done.stdout and "export NCCL_DEBUG=WARN\n" in done.stdout, done.stdout
    assert f"{shared}/blobs:{shared}/blobs,{shared}/rows.jsonl:{shared}/rows.jsonl" in done.stdout, done.stdout


@pytest.mark.parametrize("odd", ["/a $b/launch", "/a`b/launch", '/a"b/launch'])
def test_what_pyxis_would_let_a_shell_read_is_refused(odd):
    """It writes mounts between double quotes into a script; run for real, a folder called $(...) mounted the one above it."""
    job = replace(JOB, launch_folder=Path(odd))
    with pytest.raises(LaunchError, match=r"pyxis cannot mount .* dollar, backtick and double quote"):
        replace(job, container=Container("pyxis", IMAGE)).render()
    replace(job, container=Container("apptainer", "docker://img")).render()
