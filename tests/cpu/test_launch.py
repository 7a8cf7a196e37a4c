"""Launching: what is rendered, what is refused, and the parts that run on the nodes. A real Slurm is in tests/slurm."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from launch import hosts, needs, ray_cluster, ssh
from launch.containers import Container
from launch.hosts import Host, LaunchError, head_address, ports_of
from launch.kuberay import RayJob
from launch.ray_cluster import Cluster, Node, missing
from launch.slurm import SlurmJob
from trt_rl.config import load_recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/recipe.yaml"
SNAPSHOTS = Path(__file__).parent / "snapshots"
JOB = SlurmJob("dapo 8b", 2, 8, Path("/shared/runs/dapo 8b/launch"), Path("/shared/project"), paths=("/models/qwen3/config.json",))
IMAGE = "nvcr.io#nvidia/tensorrt-llm/release:1.3.0rc15"


def cli(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment
    return subprocess.run(
        [sys.executable, "-m", "trt_rl.cli", "launch", *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def same_as_snapshot(name: str, text: str) -> None:
    """With UPDATE_SNAPSHOTS=1 the files are written instead, for a person to look at."""
    file = SNAPSHOTS / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text)
    assert text == file.read_text(), f"{name} is rendered differently; if that is meant, run with UPDATE_SNAPSHOTS=1"


# --- Slurm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "job"),
    [
        (
            "slurm_bare.sbatch",
            replace(JOB, setup="module load cuda\nulimit -l unlimited", environment=("NCCL_IB_HCA=mlx5",), time="4:00:00"),
        ),
        (
            "slurm_pyxis.sbatch",
            replace(
                JOB,
                container=Container("pyxis", IMAGE, ("/models:/models",)),
                replicas=4,
                ip_version=6,
                environment=("A=1", "HOME=/h", "A=2"),
            ),
        ),
        (
            "slurm_apptainer.sbatch",
            replace(
                JOB, container=Container("apptainer", "docker://img"), requeue=False, sbatch=("--partition=h100",), object_store_bytes=10**9
            ),
        ),
    ],
)
def test_sbatch_scripts_are_as_reviewed(name, job, tmp_path):
    text = job.render()
    same_as_snapshot(name, text)
    script = tmp_path / "script"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "--shell=bash", str(script)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_everything_wrong_with_a_launch_is_in_one_error(tmp_path):
    odd = replace(
        JOB,
        name="two\nlines",
        launch_folder=Path("/a\\b/launch"),
        sbatch=("partition",),
        environment=("1X=2",),
        first_port=80,
        ip_version=5,
        container=Container("apptainer", str(tmp_path / "none.sif"), ("models",)),
        workdir=Path("/a:b"),
    )
    with pytest.raises(LaunchError) as caught:
        odd.render()
    for part in (
        r"'two\nlines' holds a line break",
        "holds a backslash",
        "'partition' is no option of sbatch",
        "'1X=2' is not NAME=VALUE",
        "--first-port = 80",
        "--ip-version = 5; works: 4, 6",
        f"container image {tmp_path}/none.sif is missing",
        "'models' is not /HOST:/CONTAINER",
        "a container cannot mount /a:b",
    ):
        assert part in str(caught.value)
    for container, message in (
        (Container("podman", "x"), r"'podman' is not known; works: none, pyxis, apptainer"),
        (Container("pyxis"), "needs --image"),
        (Container(image="x.sif"), "need --container"),
        (Container("pyxis", "/no/such.sqsh"), r"container image /no/such\.sqsh is missing"),
    ):
        with pytest.raises(LaunchError, match=message):
            replace(JOB, container=container).render()


def test_too_few_machines_and_the_plan_speak_in_one_error(tmp_path):
    done = cli("slurm", str(QUICKSTART), "--nodes=1", "--gpus-per-node=2", "trainer.parallel.tp=3", f"run.folder={tmp_path}")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "trainer.parallel.tp = 3 does not divide" in done.stdout
    few = cli("slurm", str(QUICKSTART), "--nodes=1", "--gpus-per-node=2", "--container=podman", f"run.folder={tmp_path}")
    assert few.returncode == 2 and "2 nodes of 2, but cluster.nodes (--nodes of a launch) = 1, 2 GPUs; set cluster.nodes = 2" in few.stdout
    assert "'podman' is not known" in few.stdout, "what is wrong with the launch comes in the same error"

    def shared(**cluster):
        recipe = load_recipe(QUICKSTART, ["rollout.colocated=true", "rollout.engine=vllm", "rollout.parallel.tp=2"])
        return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=cluster)})

    assert needs.nodes(shared(), 2) == 1 and not needs.shortage(shared(nodes=1, gpus_per_node=2), None)
    assert "= 3 CPUs, the recipe needs 4" in needs.shortage(shared(nodes=1, gpus_per_node=0), 3)[0]


def test_nodes_are_the_recipes_if_nothing_else_is_said(tmp_path):
    shape = f"model.path={ROOT}/examples/shapes/qwen3-30b-a3b"
    done = cli("slurm", str(ROOT / "examples/dapo_qwen3_30b_a3b_fp8/recipe.yaml"), shape, f"run.folder={tmp_path}", "--dry-run")
    assert "#SBATCH --nodes=2\n" in done.stdout and "#SBATCH --gpus-per-node=8\n" in done.stdout, done.stdout


def test_without_slurm_the_script_is_still_written(tmp_path):
    path = tmp_path / "run"
    programs = tmp_path / "bin"
    programs.mkdir()
    done = cli("slurm", str(QUICKSTART), "--gpus-per-node=0", f"run.folder={path}", "--submit", PATH=str(programs))
    assert done.returncode == 2 and "Slurm is not installed here (no sbatch on PATH)" in done.stdout
    (recipe,) = (path / "launch").glob("recipe-*.yaml")
    assert f'"$launch_folder/{recipe.stem}$replica.yaml"' in (path / "launch/trt_rl.sbatch").read_text()
    assert load_recipe(recipe).run.folder == str(path)
    assert "note: run.save_every = 0: all is lost" in done.stderr
    again = cli("slurm", str(QUICKSTART), "--gpus-per-node=0", f"run.folder={path}", "run.save_every=10")
    assert again.returncode == 0 and not again.stderr
    assert len(list((path / "launch").glob("recipe-*.yaml"))) == 2, "a waiting job's recipe was replaced"
    dry = cli("slurm", str(QUICKSTART), "--gpus-per-node=0", f"run.folder={tmp_path}/dry", "--dry-run")
    assert dry.returncode == 0 and dry.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=quickstart\n") and not (tmp_path / "dry").exists()


def test_rendering_imports_neither_torch_nor_ray():
    program = "import sys, launch.cli; sys.exit(bool({'torch', 'ray', 'megatron'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# --- nodes ------------------------------------------------------------------------------------------------------


def test_ports_of_jobs_and_of_nodes_that_share_a_machine_differ():
    pair, apart = Host.parse("a=10.0.0.1,b=10.0.0.1"), Host.parse("a,b")
    taken: set[int] = set()
    for job in range(1000, 1000 + hosts.slots()):
        for name in ("a", "b"):
            ports = set(vars(ports_of(pair, name, job)).values())
            assert len(ports) == 9 and not ports & taken and min(ports) >= 20000 and max(ports) < 32768
            taken |= ports
    assert ports_of(apart, "a", 7) == ports_of(apart, "b", 7) != ports_of(apart, "a", 8)
    with pytest.raises(LaunchError, match="5 nodes of the job share the machine"):
        ports_of(Host.parse("a=h,b=h,c=h,d=h,e=h"), "e", 1)
    with pytest.raises(LaunchError, match=r"first-port = 40000: .* between 1024 and 32768"):
        ports_of(apart, "a", 1, 40000)
    for text in ("", "a,,b", "a,b,a"):
        with pytest.raises(LaunchError, match="a name of its own"):
            Host.parse(text)


def test_a_taken_port_is_named_and_a_freed_one_is_not():
    ports = ports_of(Host.parse("a"), "a", os.getpid())
    assert hosts.taken_ports(ports, 0) == []
    for address, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        try:
            listening = socket.create_server((address, ports.gcs), family=family)
        except OSError as error:
            assert family == socket.AF_INET6, error  # this machine has no IPv6
            continue
        with listening:
            assert f"port in use: {ports.gcs} (gcs);" in hosts.taken_ports(ports, 0)[0]
    assert hosts.taken_ports(ports, 0) == []


def test_what_a_machine_lacks(tmp_path, monkeypatch):
    ports = ports_of(Host.parse("a"), "a", 1)
    monkeypatch.setattr(hosts, "_PROC", tmp_path)
    assert hosts.ephemeral_problems(ports) == []
    (tmp_path / "ip_local_port_range").write_text("9000\t65535\n")
    (tmp_path / "ip_local_reserved_ports").write_text("\n")
    assert "ports 20040-20048 lie where" in hosts.ephemeral_problems(ports)[0]
    (tmp_path / "ip_local_reserved_ports").write_text("8080,20000-32767\n")
    assert hosts.ephemeral_problems(ports) == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\necho 'GPU 1: H200 (UUID: y)'\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = hosts.problems_here(ports, [str(tmp_path / "no/config.json"), str(smi)], 8, 0)
    assert found[0].startswith(f"{tmp_path}/no/config.json is missing") and "lists 2 GPUs, the job needs 8" in found[1] and len(found) == 2


def test_the_head_is_found_by_lookup_and_never_by_loopback(monkeypatch):
    names = {
        "v4": ["10.0.0.1"],
        "both": ["fd00::1", "10.0.0.2"],
        "v6": ["fd00::3"],
        "local": ["127.0.1.1", "fe80::1%eth0"],
        "peer": ["10.0.0.9"],
    }

    def getaddrinfo(name, port, family, kind):
        found = [a for a in names.get(name, []) if family in (0, socket.AF_INET6 if ":" in a else socket.AF_INET)]
        if not found:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (a, 0)) for a in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(hosts, "address_towards", lambda address: {"10.0.0.9": "10.0.0.7"}.get(address, ""))
    for text, version, expected in (
        ("v4,peer", None, "10.0.0.1"),
        ("both,peer", None, "10.0.0.2"),
        ("both,peer", 6, "fd00::1"),
        ("v6,peer", None, "fd00::3"),
        ("n1=local,n2=peer", None, "10.0.0.7"),
        ("n1=local,n2=local", None, "127.0.1.1"),
    ):
        assert head_address(Host.parse(text), version) == expected
    for text, version in (("v4,peer", 6), ("n1=local,n2=gone", None), ("gone,peer2", None)):
        with pytest.raises(LaunchError, match=r"has no .*address that other nodes reach"):
            head_address(Host.parse(text), version)
    assert hosts.joined("fd00::3", 1) == "[fd00::3]:1" and hosts.joined("10.0.0.1", 1) == "10.0.0.1:1"


def cluster(tmp_path: Path, me: str = "b", **changes) -> Cluster:
    given = dict(cpus=2, gpus=8, object_store_bytes=None, logs=tmp_path, deadline_s=5.0) | changes
    return Cluster(Host.parse("a=127.0.0.1,b=127.0.0.1"), me, 5, 20000, "127.0.0.1", **given)


def test_missing_nodes_and_missing_gpus_are_named(tmp_path):
    one = cluster(tmp_path)
    nodes = {"a": {"Resources": {"GPU": 8.0, "CPU": 1.0}}, "b": {"Resources": {"CPU": 2.0}}}
    assert missing(one, nodes) == ["a joined with 1 of 2 CPUs", "b joined with 0 of 8 GPUs"]
    one.tell("the head answers at x")
    assert missing(one, {"a": {"Resources": {"GPU": 8.0, "CPU": 2.0}}}) == ["b (127.0.0.1) did not join; the head answers at x"]
    assert [line.split(" ")[0] for line in missing(one, {})] == ["a", "b"]


def test_ray_is_started_with_every_port_said(tmp_path):
    for me in ("a", "b"):
        node = Node(cluster(tmp_path, me))
        node.folder = tmp_path
        command, ports = node.command(), vars(ports_of(node.cluster.hosts, me, 5))
        said = {int(word.rpartition("=")[2]) for word in command if word.partition("=")[0].endswith("-port") or word.startswith("--port")}
        only_head = {"gcs", "client", "dashboard"} if me == "b" else set()
        kernels_choice = {0}  # of worker processes
        assert said - kernels_choice == {port for name, port in ports.items() if name not in only_head}
        assert "--min-worker-port=0" in command and "--max-worker-port=0" in command
        assert ("--head" in command) == (me == "a") and ("--address=127.0.0.1:20200" in command) == (me == "b")


def test_launchers_variables_and_other_clusters_stay_outside(monkeypatch):
    for name in (
        "PMI_RANK",
        "PMIX_SERVER_URI2",
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_RANK",
        "SLURM_JOB_ID",
        "SLURMD_NODENAME",
        "RAY_ADDRESS",
        "LOCAL_RANK",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    clean = hosts.clean_environment()
    assert clean["NCCL_IB_HCA"] == "mlx5" and "PATH" in clean
    assert not [name for name in clean if name.startswith(("PMI", "MPI", "OMPI", "SLURM", "RAY_ADDRESS", "LOCAL_RANK", "MASTER_PORT"))]


# --- ssh --------------------------------------------------------------------------------------------------------

SHELL = """#!/bin/bash
# Like ssh: the first argument is the host, the rest a line for a shell.
shift
exec bash -c "$*"
"""


@pytest.fixture
def shell(tmp_path) -> str:
    program = tmp_path / "shell"
    program.write_text(SHELL)
    program.chmod(0o755)
    return str(program)


def test_hosts_over_ssh_run_a_driver_and_pass_its_exit_code_on(shell, tmp_path):
    """A real Ray of two nodes; only ssh is a stand-in here (tests/slurm has a real one)."""
    driver = (
        "import os, ray, sys; ray.init(); sys.exit(40 + len(ray.nodes()) + (os.environ['NCCL_DEBUG'] == 'WARN') + sys.argv.index('a b'))"
    )
    command = f'{sys.executable} -c "{driver}" "a b"'
    done = cli(
        "ssh", str(QUICKSTART), "--hosts=n1=127.0.0.1,n2=127.0.0.1", "--gpus-per-node=0", "--cpus-per-node=1", "--object-store-memory=80000000",
        "--ssh", shell, "--command", command, f"run.folder={tmp_path}/a run", "--ready-timeout=250", NCCL_DEBUG="WARN",
    )  # fmt: skip
    assert done.returncode == 44, done.stdout + done.stderr
    assert "2 of 2 nodes" in done.stdout
    logs = next((tmp_path / "a run/launch").glob("ssh.*"))
    assert {"n1.log", "n2.log", "n1.ray", "n2.ray"} <= {path.name for path in logs.iterdir()}
    assert stat.S_IMODE((logs / "ray_token").stat().st_mode) == 0o600


def test_what_hosts_lack_is_in_one_error(shell, tmp_path):
    job = ssh.SshJob(
        Host.parse("n1=127.0.0.1,n2=127.0.0.1"), 0, tmp_path / "launch", ROOT, ("true",), sys.executable, paths=("/no/model",), ssh=(shell,)
    )
    with pytest.raises(LaunchError) as caught:
        job.run()
    assert "nothing was started: 2 problem(s)" in str(caught.value)
    assert "n1: /no/model is missing" in str(caught.value) and "n2: /no/model is missing" in str(caught.value)
    with pytest.raises(LaunchError, match=r"n1: .*No such file or directory \(is it reached by ssh\?\)"):
        replace(job, python="/no/python").run()
    with pytest.raises(LaunchError, match=r"(?s)begins with a dash.*no such program here"):
        replace(job, hosts=Host.parse("-oProxyCommand=x"), ssh=("no-such-ssh",)).run()


def test_ssh_command_lines_are_as_reviewed(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NCCL_")] + ["PYTHONPATH", "GLOO_SOCKET_IFNAME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "it's on")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    job = ssh.SshJob(
        Host.parse("a,b=fd00::2"), 8, Path("/runs/a b/launch"), Path("/my project"), ("trt-rl", "train", "x y"), "python", job=7
    )
    same_as_snapshot("ssh.txt", "\n".join(" ".join(line) for line in job.commands()) + "\n")


# --- Kubernetes -------------------------------------------------------------------------------------------------

KUBE = RayJob(
    "dapo-8b", "registry/trt_rl:1", "name: dapo\n", 2, 8, 32, "512Gi", "64Gi", "rl", ("models:/models", "runs:/runs"), ("NCCL_IB_HCA=mlx5",), 3,
    {"run.folder": "/runs/dapo", "model.path": "/models/qwen3"},
)  # fmt: skip


def rayjob_schema() -> dict:
    """KubeRay's, see tests/support/kuberay; keys that it does not know are mistakes here, while Kubernetes drops them silently."""

    def closed(node):
        if isinstance(node, list):
            return [closed(item) for item in node]
        if not isinstance(node, dict):
            return node
        inner = {key: ({k: closed(v) for k, v in value.items()} if key == "properties" else closed(value)) for key, value in node.items()}
        return inner | ({"additionalProperties": False} if isinstance(inner.get("properties"), dict) and "type" in inner else {})

    loaded = json.loads(gzip.decompress((ROOT / "tests/support/kuberay/rayjob_v1.json.gz").read_bytes()))
    schema = closed(loaded)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def test_the_rayjob_fits_kuberays_schema():
    text = KUBE.render()
    same_as_snapshot("kuberay.yaml", text)
    config, job = yaml.safe_load_all(text)
    validator = jsonschema.Draft202012Validator(rayjob_schema())
    validator.validate(job)
    validator.validate(next(d for d in yaml.safe_load_all(replace(KUBE, nodes=1, gpus=0).render()) if d["kind"] == "RayJob"))
    assert config["data"]["recipe.yaml"] == "name: dapo\n"
    for break_it in (
        lambda spec: spec.update(entrypont="x"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 8}),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].update(volumeMount=[]),
    ):
        broken = json.loads(json.dumps(job))
        break_it(broken["spec"])
        assert not validator.is_valid(broken)


def test_a_rayjob_that_cannot_run_is_refused_with_all_reasons():
    odd = replace(KUBE, name="DAPO_8b", image="", memory="lots", volumes=("models",), environment=("x",))
    with pytest.raises(LaunchError) as caught:
        odd.render(["too few"])
    for part in ("8 problem(s)", "--image is needed", "e.g. dapo-8b", "--memory = 'lots'", "'models': the name of a claim", "too few",
                 "'x' is not NAME=VALUE", "run.folder = /runs/dapo is not on a volume"):  # fmt: skip
        assert part in str(caught.value)
    done = cli("kuberay", str(QUICKSTART), "--image=i", "--gpus-per-node=8", "--volume=v:/v", "run.folder=/v/run")
    assert done.returncode == 2 and "model.path = examples/quickstart/model is not on one of /v" in done.stdout
    done = cli("kuberay", str(QUICKSTART), "--image=i", "--volume=v:/v", "run.folder=/v/run", "model.path=/v/model", NCCL_DEBUG="INFO")
    assert done.returncode == 0 and "- name: NCCL_DEBUG\n" in done.stdout


def test_a_driver_that_hangs_after_rays_end_is_left_to_be_ended(monkeypatch, capsys):
    from types import SimpleNamespace

    monkeypatch.setattr(ray_cluster, "_WITHOUT_RAY_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline() == "deaf\n"
        gone = SimpleNamespace(ended=lambda: "it ended")
        assert ray_cluster._drive(driver, SimpleNamespace(count=0), gone, while_stdin=False) == 1
        assert driver.poll() is None and "Ray on the head ended while the driver ran: it ended" in capsys.readouterr().err
    finally:
        driver.kill()
        driver.wait()
