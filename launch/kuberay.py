"""A run on Kubernetes: a KubeRay RayJob and the ConfigMap with its recipe, as YAML. Rendered only."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

import yaml

from launch.hosts import LaunchError, environment_problems

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 47  # KubeRay's limit: it appends to the name
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|k|m)?")
_RECIPE = "/etc/trt_rl"


def name_from(text: str) -> str:
    """A name that Kubernetes takes, like `text`."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:_LONGEST_NAME].strip("-") or "run"


@dataclass(frozen=True)
class RayJob:
    name: str
    image: str
    recipe: str
    nodes: int
    gpus: int
    cpus: int
    memory: str
    shared_memory: str
    namespace: str = ""
    volumes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    retries: int = 0
    folders: dict[str, str] = field(default_factory=dict)
    """Of the recipe, by key: they must lie on a volume, or the pods do not share them."""

    def problems(self) -> list[str]:
        found = []
        if not self.image:
            found.append("--image is needed: a container image with trt_rl, e.g. one built from docker/Dockerfile")
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            works = name_from(self.name)
            found.append(
                f"--name = {self.name!r}: a letter, then letters, digits, dashes, at most {_LONGEST_NAME}, in lower case; e.g. {works}"
            )
        for option, value in (("--memory", self.memory), ("--shared-memory", self.shared_memory)):
            if not _QUANTITY.fullmatch(value):
                found.append(f"{option} = {value!r} is no Kubernetes quantity; write e.g. 64Gi")
        good = [volume for volume in self.volumes if re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[^:]*", volume)]
        found += [
            f"--volume {volume!r}: the name of a claim in lower case, a colon, an absolute path; e.g. shared:/data"
            for volume in self.volumes
            if volume not in good
        ]
        found += environment_problems(self.environment)
        mounted = [volume.partition(":")[2].rstrip("/") for volume in good]
        for key, path in self.folders.items():
            if not any(path == mount or path.startswith(mount + "/") for mount in mounted):
                on = f"one of {', '.join(mounted)}" if mounted else "a volume of all pods; add --volume CLAIM:/PATH"
                found.append(f"{key} = {path} is not on {on}")
        return found

    def render(self, more_problems: list[str] | None = None) -> str:
        """Raises:
        LaunchError: lists everything that cannot work.
        """
        if found := self.problems() + (more_problems or []):
            raise LaunchError.of("the RayJob cannot be rendered", found)
        return yaml.safe_dump_all([self._config_map(), self._job()], sort_keys=False)

    def _config_map(self) -> dict:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(), "data": {"recipe.yaml": self.recipe}}

    def _metadata(self) -> dict:
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})

    def _job(self) -> dict:
        cluster: dict = {"headGroupSpec": {"rayStartParams": self._start(), "template": self._pod("head")}}
        if self.nodes > 1:
            workers = {"groupName": "workers", "replicas": self.nodes - 1, "minReplicas": self.nodes - 1, "maxReplicas": self.nodes - 1}
            cluster["workerGroupSpecs"] = [workers | {"rayStartParams": self._start(), "template": self._pod("worker")}]
        spec = {
            "entrypoint": shlex.join(["trt-rl", "train", f"{_RECIPE}/recipe.yaml", "--resume-or-start"]),
            "submissionMode": "K8sJobMode",
            "backoffLimit": self.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": cluster,
        }
        return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": self._metadata(), "spec": spec}

    def _start(self) -> dict[str, str]:
        return {"num-gpus": str(self.gpus), "num-cpus": str(self.cpus)}

    def _pod(self, role: str) -> dict:
        limits = {"cpu": str(self.cpus), "memory": self.memory} | ({"nvidia.com/gpu": str(self.gpus)} if self.gpus else {})
        mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "recipe", "mountPath": _RECIPE}]
        volumes: list[dict] = [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": self.shared_memory}},
            {"name": "recipe", "configMap": {"name": self.name}},
        ]
        for i, (claim, _, path) in enumerate(volume.partition(":") for volume in self.volumes):
            volumes.append({"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": f"volume-{i}", "mountPath": path})
        container = {
            "name": f"ray-{role}",
            "image": self.image,
            "env": [{"name": name, "value": value} for name, _, value in (pair.partition("=") for pair in self.environment)],
            "resources": {"limits": limits, "requests": dict(limits)},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},  # NCCL pins memory for InfiniBand
            "volumeMounts": mounts,
        }
        return {"spec": {"containers": [container], "volumes": volumes}}
