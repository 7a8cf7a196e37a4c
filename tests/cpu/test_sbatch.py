"""The sbatch script run by a shell, with programs that stand in for Slurm's: what it calls, and what it does about their answers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from launch.containers import Container
from launch.slurm import SlurmJob
from tests.cpu.test_launch import IMAGE, JOB, QUICKSTART, cli
from trt_rl.config import load_recipe

STAND_IN = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
*"show hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
*"show node"*) for n in 3 1 2; do echo "NodeName=n$n Arch=x86_64 NodeAddr=10.0.0.$n NodeHostName=n$n Port=0"; done ;;
*"launch.ray_cluster check "*)
    sleep "${CHECK_S:-0}"
    while [ "$1" != --logs ]; do shift; done
    echo 10.0.0.1 10.0.0.1:20000 >"$2/address"
    exit "${CHECK_CODE:-0}" ;;
*" worker "*) cat >/dev/null ;;
*" head "*)
    if [ -n "${HEAD_ASKS:-}" ]; then kill -USR1 "$PPID"; sleep 0.5; fi
    sleep "${HEAD_S:-0}"
    exit "${HEAD_CODE:-0}" ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path):
    """srun and scontrol that write down how they are called: for what only a cluster with containers could run."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(STAND_IN.replace('"$*" >>', f'"{name} $*" >>', 1))
        (programs / name).chmod(0o755)

    def run(job: SlurmJob, **environment: str) -> tuple[int, list[str], str]:
        calls.write_text("")
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "321", "SLURM_JOB_NUM_NODES": "3"}
        env |= {"SLURM_JOB_NODELIST": "n[1-3]"} | environment
        script = tmp_path / "script"
        script.write_text(job.render())
        done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr

    return run


def test_containers_are_entered_in_every_step(stand_in, tmp_path):
    job = replace(JOB, nodes=3, launch_folder=tmp_path / "a run/launch", container=Container("pyxis", IMAGE), python="python")
    code, calls, text = stand_in(job, HEAD_CODE="5")
    assert code == 5, text
    steps = [call for call in calls if call.startswith("srun") and "launch.ray_cluster" in call]
    roles = [next(role for role in ("check", "worker", "head") if f"launch.ray_cluster {role} " in step) for step in steps]
    assert sorted(roles) == ["check", "head", "worker"], "one step for all workers, and the image is unpacked twice on a node"
    inside = f"--container-image={IMAGE} --container-mounts=/tmp:/tmp,/shared/project:/shared/project,{tmp_path}/a run:{tmp_path}/a run"
    assert all(inside in step and "--overlap" in step for step in steps)
    by_role = dict(zip(roles, steps, strict=True))
    assert "--nodes=3 --ntasks=3 " in by_role["check"] and "--gpus 8" in by_role["check"]
    assert "--nodes=2 --ntasks=2 --nodelist=n2,n3 " in by_role["worker"]
    assert "--nodes=1 --ntasks=1 --nodelist=n1 " in by_role["head"]
    assert "--hosts n1=10.0.0.1,n2=10.0.0.2,n3=10.0.0.3" in by_role["head"], "the job's order, not scontrol's"
    assert f"-- python -m trt_rl.cli train {job.launch_folder}/recipe.yaml --resume-or-start" in by_role["head"]
    attach = (job.launch_folder / "321.1/attach.sh").read_text()
    assert "--container-image=" in attach and "RAY_ADDRESS=10.0.0.1:20000" in attach

    code, calls, text = stand_in(replace(job, container=Container("apptainer", "docker://img")), SLURM_RESTART_COUNT="2")
    assert code == 0 and "attempt 3" in text
    command = f"apptainer exec --nv --bind=/shared/project:/shared/project --bind={tmp_path}/a run:{tmp_path}/a run --pwd=/shared/project docker://img python"
    assert sum(command in call for call in calls) == 3


def test_nothing_starts_where_a_check_fails_or_hangs(stand_in, tmp_path):
    job = replace(JOB, launch_folder=tmp_path / "launch", ready_timeout_s=2)
    code, calls, text = stand_in(job, CHECK_CODE="2")
    assert code == 2 and "nothing was started; each node has named above what it lacks" in text
    assert not any(" head " in call or " worker " in call for call in calls)
    (tmp_path / "launch/321.1/n2.state").touch()  # n2 has answered
    code, calls, text = stand_in(job, CHECK_S="60")
    assert code == 2 and "nothing was started; no answer within 2 s (--ready-timeout) from: n1 n3\n" in text
    assert not any(" head " in call or " worker " in call for call in calls)


def test_a_job_that_never_comes_to_a_checkpoint_does_not_go_round_for_ever(stand_in, tmp_path):
    job, unsaved = replace(JOB, launch_folder=tmp_path / "launch"), tmp_path / "launch/321.unsaved"

    def interrupted(attempt: int, code: str) -> tuple[bool, str]:
        exit_code, calls, text = stand_in(job, HEAD_ASKS="1", HEAD_CODE=code, SLURM_RESTART_COUNT=str(attempt))
        assert exit_code == int(code)
        return "scontrol requeue 321" in calls, text

    assert interrupted(0, "143")[0] and interrupted(1, "143")[0]
    assert interrupted(2, "130")[0] and not unsaved.exists(), "it has saved: the count begins anew"
    assert interrupted(3, "143")[0] and interrupted(4, "143")[0]
    requeued, text = interrupted(5, "143")
    assert not requeued and "not requeued: three attempts in a row were interrupted before a checkpoint" in text


def test_a_head_that_slurm_does_not_start_is_named_at_the_deadline(stand_in, tmp_path):
    code, _, text = stand_in(replace(JOB, launch_folder=tmp_path / "launch", ready_timeout_s=2), HEAD_S="60")
    assert code == 2 and "Slurm did not start the head's step on n1 within 2 s (--ready-timeout)" in text


def test_a_replica_takes_its_own_recipe(stand_in, tmp_path):
    job = replace(JOB, launch_folder=tmp_path / "launch", replicas=3, python="python")
    _, calls, _ = stand_in(job, SLURM_ARRAY_TASK_ID="2")
    assert any(f"train {tmp_path}/launch/recipe_2.yaml" in call for call in calls)
    done = cli("slurm", str(QUICKSTART), "--replicas=3", "--gpus-per-node=0", f"run.folder={tmp_path}/run")
    assert done.returncode == 0, done.stdout
    for i in range(3):
        (file,) = (tmp_path / "run/launch").glob(f"recipe-*_{i}.yaml")
        one = load_recipe(file)
        assert (one.seed, one.run.folder) == (1 + i, f"{tmp_path}/run/replica_{i}")
    assert "#SBATCH --array=0-2\n" in (tmp_path / "run/launch/trt_rl.sbatch").read_text()
