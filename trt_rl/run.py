"""Everything around the steps: the run's folder, its processes, validation, checkpoints, and a clean end."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import ray
import transformers

from trt_rl import plan
from trt_rl.batch import make_batch
from trt_rl.config import Recipe, dump_recipe
from trt_rl.data.prompts import PromptSet, PromptStream, read_rows
from trt_rl.errors import CheckpointError, DataError, ModelError, RecipeError
from trt_rl.observe.log import MetricLog, console, plot_progress, progress_line, read_jsonl, write_jsonl
from trt_rl.observe.span import span
from trt_rl.placement import Places
from trt_rl.processes import gpus_per_actor, scrub_mpi_variables
from trt_rl.refit.hf_files import HFFolder
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.route import Placement
from trt_rl.refit.session import RefitSession
from trt_rl.refit.transports.link import Meeting
from trt_rl.reward.pool import RewardPool, check_reward
from trt_rl.rollout.pool import RolloutPool
from trt_rl.samples import Group, Sampler, rollout_rows
from trt_rl.trainer.group import TrainerGroup

_OURS = (
    "recipe.yaml",
    "precision.json",
    "metrics.jsonl",
    "summary.json",
    "progress.png",
    "refit",
    "hf_quant_config.json",
    "rollouts",
    "checkpoints",
    "tensorboard",
    "model",
)


class Run:
    """A context: entering starts every process, leaving stops every process, whatever happened between.

    The first SIGINT or SIGTERM ends the run after the step in progress, with a checkpoint; the second at once.
    """

    def __init__(self, recipe: Recipe, resume: bool, overwrite: bool, resume_or_start: bool = False) -> None:
        self.recipe, self.folder = recipe, recipe.folder
        self.arch = plan.check(recipe)
        self.step = 0
        self.version = -1
        self.interrupted = False
        self.asleep = False
        self.input_scales: dict[str, float] = {}
        self.ready = False  # nothing is worth saving before every process is up
        self.summary: dict[str, Any] = {"seconds": 0.0, "refit_bytes": 0, "reward_failures": 0}
        self.checkpoint = self._find_checkpoint(required=not resume_or_start) if resume or resume_or_start else None
        # A job that was put back into the queue before its first checkpoint begins anew; a finished run is never replaced so.
        self.unfinished = resume_or_start and not (self.folder / "summary.json").exists()
        self.overwrite = overwrite or self.unfinished
        self._refuse_held_folder()
        self.started = time.perf_counter()
        span.reset()

    # --- beginning and end -------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self._handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._prepare_data()
            check_reward(self.recipe.reward)
            self._claim_folder()  # only now: a mistake found above costs nothing that was there
            with span("start"):
                self._start_processes()
            if not self.recipe.trainer.offload:
                self._restore()
            self._calibrate()
            self.log = MetricLog(self.folder, self.recipe.run.tensorboard, self.step)
            self.ready = True
        except BaseException:
            self._stop_processes()
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if isinstance(error, DataError) and self.step:
                self.save()  # the trainer is well; what it has learned outlives the data's end
            self.log.close()
        finally:
            self._stop_processes()

    def _interrupt(self, signum, frame) -> None:
        if self.interrupted or not self.ready:
            raise KeyboardInterrupt(signum)
        self.interrupted = True
        console.print("interrupt: finishing this step, then saving a checkpoint (again to stop at once)")

    def continues(self) -> bool:
        return self.step < self.recipe.run.steps and not self.interrupted

    def _refuse_held_folder(self) -> None:
        held = [name for name in ("metrics.jsonl", "summary.json", "checkpoints") if (self.folder / name).exists()]
        if held and not self.overwrite and self.checkpoint is None:
            raise RecipeError(
                f"run.folder {self.folder} already holds a run ({', '.join(held)}); continue it with --resume, "
                "replace it with --overwrite, or set run.folder"
            )

    def _claim_folder(self) -> None:
        """Make the folder ours; of an earlier run there, only what runs write is removed. What a run wrote that ended before
        its first checkpoint is moved aside."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            found = [path for name in _OURS if (path := self.folder / name).exists()] if self.checkpoint is None else []
            if found and self.unfinished:
                aside = next(path for n in itertools.count(1) if not (path := self.folder / f"unfinished_{n}").exists())
                aside.mkdir()
                for path in found:
                    path.rename(aside / path.name)
            elif found:
                for path in found:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe))
        except OSError as error:
            raise RecipeError(f"run.folder {self.folder} cannot be written: {error.strerror}; set run.folder") from error

    def _lock_folder(self) -> None:
        """Until this process ends: a second run would move or replace what the first one writes."""
        self.lock = open(self.folder / ".lock", "a+")  # noqa: SIM115  closing it would unlock
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            raise RecipeError(f"run.folder {self.folder} is in use by {self.lock.read().strip()}; wait for it, or set run.folder") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            console.print(f"run.folder {self.folder}: this file system has no locks; nothing keeps a second run out of it")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.lock.flush()

    def _prepare_data(self) -> None:
        model, data = self.recipe.model, self.recipe.data
        HFFolder(model.path, self.arch)  # reads headers only: a damaged model is named before any process starts
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model.tokenizer or model.path)
        except (OSError, ValueError) as error:
            raise ModelError(f"no tokenizer in {model.tokenizer or model.path}: {error}; set model.tokenizer") from error
        train = PromptSet(read_rows(data.train, "data.train"), self.tokenizer, data, "data.train")
        self.dropped = train.dropped
        self.training_prompts = train.prompts
        self.prompts = PromptStream(train, self.recipe.seed, data.shuffle)
        self.heldout = None
        if data.validation is not None:
            rows = read_rows(data.validation, "data.validation")
            self.heldout = PromptSet(rows, self.tokenizer, data, "data.validation")
        for key, prompts in (("data.train", train), ("data.validation", self.heldout)):
            if prompts is not None:
                note = f", {prompts.dropped} longer than {data.max_prompt_tokens} tokens dropped" if prompts.dropped else ""
                console.print(f"{key}: {len(prompts)} prompts{note}")

    def _start_processes(self) -> None:
        recipe, layout, engine = self.recipe, self.recipe.trainer.parallel.layout(), self.recipe.rollout.layout()
        console.print(
            f"model: {self.arch.model_type}, {self.arch.parameters():,} parameters; trainer: {layout}, {recipe.trainer.precision}"
        )
        table = PrecisionTable.build(self.arch, recipe.refit.policy())
        (self.folder / "precision.json").write_text(json.dumps({"digest": table.digest, "formats": table.formats}, indent=1))
        (self.folder / "hf_quant_config.json").write_text(json.dumps(table.hf_quant_config(), indent=1))
        console.print(f"engine: {recipe.rollout.engine} x {recipe.rollout.replicas}; {table.summary()}")
        if not ray.is_initialized():
            scrub_mpi_variables()
            # Without RAY_ADDRESS this starts a private cluster on this machine, large enough for what the recipe asks,
            # whatever other cluster runs here; RAY_ADDRESS=auto joins that one.
            address = os.environ.get("RAY_ADDRESS") or "local"
            own = {"num_cpus": 2 * layout.world + engine.world, "include_dashboard": False} if address == "local" else {}
            try:
                ray.init(address, log_to_driver=False, logging_level="error", configure_logging=False, **own)
            except ConnectionError as error:
                raise RecipeError(f"no Ray cluster answers at RAY_ADDRESS = {address}: {error}") from error
            self._own_ray = True
            signal.signal(signal.SIGTERM, self._interrupt)  # ray.init puts its own in place, which ends the process at once
        self._check_resources(layout.world + (0 if recipe.rollout.colocated else engine.world), 2 if recipe.rollout.colocated else 1)
        self.rewards = RewardPool(recipe.reward)
        self.places = Places.reserve(recipe)
        console.print(self.places.summary())
        self.trainer = TrainerGroup.start(recipe, self.places)
        self.pool = RolloutPool.start(recipe, self.places)
        if recipe.rollout.colocated:  # engines measure free memory while they start: the trainer's is taken by then
            self._build_trainer()
            digests = self.pool.wait(self.pool.begin_build(self.trainer.gpus()))
        else:
            building = self.pool.begin_build([""] * layout.world)
            self._build_trainer()
            digests = self.pool.wait(building)
        tables = {"driver": table.digest} | {f"engine {i}": digest for i, digest in enumerate(digests)}
        self.session = RefitSession(self._agreement(), self.trainer, self.pool, tables, recipe.refit.verify)
        self.sampler = Sampler(recipe, self.pool, self.rewards, self.tokenizer, self._stop_tokens())

    def _build_trainer(self) -> None:
        self.trainer.build()
        if self.recipe.trainer.offload:
            # It passes over the GPU on its way to host memory. Without offload Adam's moments stay there, and come after the
            # engines have measured what is free, as in a run that is not resumed.
            self._restore()

    def _calibrate(self) -> None:
        """fp8_per_tensor needs the magnitude of activations: of the policy that the run starts with, on its prompts."""
        if self.recipe.refit.format != "fp8_per_tensor":
            return
        with span("calibrate"):
            if self.input_scales:  # a resumed run keeps the scales that it began with
                self.trainer.set_input_scales(self.input_scales)
                return
            prompts = [list(p.tokens) for p in self.training_prompts[: self.recipe.refit.calibration_prompts]]
            self.input_scales = self.trainer.calibrate(make_batch(prompts, [[]] * len(prompts), [[]] * len(prompts)))

    def _agreement(self) -> Agreement:
        refit, layout, engine = self.recipe.refit, self.recipe.trainer.parallel.layout(), self.recipe.rollout.layout()
        best = "gloo" if not gpus_per_actor() else "ipc" if self.recipe.rollout.colocated else "nccl"
        transport = best if refit.transport == "auto" else refit.transport
        host, port = self.trainer.address
        folder = str((self.folder / "refit").resolve()) if transport == "disk" else ""
        meeting = Meeting(host, port, layout.world + engine.world, layout.world, refit.timeout_s, folder=folder)
        return Agreement(layout, engine, refit.bucket_mib * 2**20, transport, meeting, Placement(*self.places.numbered()), refit.delta)

    def _check_resources(self, ranks: int, cpus: int) -> None:
        have = ray.cluster_resources()
        for kind, each in (("GPU", gpus_per_actor()), ("CPU", cpus)):
            if ranks * each > have.get(kind, 0):
                raise RecipeError(
                    f"the run needs {ranks * each} {kind}s for the ranks of trainer.parallel and of rollout.parallel times rollout.replicas, "
                    f"the Ray cluster has {have.get(kind, 0):.0f}; use a smaller layout, fewer replicas or a larger cluster"
                )

    def _stop_tokens(self) -> tuple[int, ...]:
        tokens = list(self.recipe.rollout.stop_token_ids)
        if self.tokenizer.eos_token_id is not None:
            tokens.append(self.tokenizer.eos_token_id)
        if not tokens:
            raise RecipeError("the tokenizer has no end-of-sequence token; set rollout.stop_token_ids")
        return tuple(dict.fromkeys(tokens))

    def _stop_processes(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if getattr(self, "_own_ray", False):
            ray.shutdown()

    # --- phases that are not the algorithm's -------------------------------------------------------------------

    def rest_engines(self) -> None:
        """Where engines share the trainer's GPUs: they have none of the memory until the next refit."""
        if self.recipe.rollout.colocated:
            with span("sleep"):
                self.pool.pause("drain")
                self.pool.sleep()
                self.asleep = True

    def refit(self) -> None:
        """Give every engine the trainer's current weights as the next version."""
        with span("refit"):
            if self.asleep:
                self.pool.wake("weights", self.session.engines)
            else:
                self.pool.pause("drain")
            self.version += 1
            outcome = self.session.run(self.version)
            for engine in outcome.failed.keys() - set(self.session.engines):
                self.pool.lose(engine, outcome.failed[engine])
            self.pool.serving = outcome.serving
            if self.asleep:
                self.pool.wake("kv_cache", self.session.engines)
                self.asleep = False
            self.pool.resume()
        for engine, reason in outcome.failed.items() - self.pool.lost.items():
            console.print(f"engine {engine} did not take version {self.version} and serves nothing: {reason}")
        self.summary["refit_bytes"] = outcome.bytes
        if self.recipe.refit.delta:
            self.summary["refit_saved_bytes"] = self.summary.get("refit_saved_bytes", 0) + outcome.saved_bytes
        self.refit_metrics = {
            "refit/bytes": outcome.bytes,
            "refit/saved_bytes": outcome.saved_bytes,
            "refit/verified_slices": outcome.verified,
            "refit/engines": len(outcome.serving),
            **{f"refit/{phase}_s": seconds for phase, seconds in outcome.seconds.items()},
        }

    def validate(self) -> dict[str, float]:
        """Accuracy (score at least 1) and mean score on the held-out prompts, one sample each."""
        if self.heldout is None:
            return {}
        with span("validate"):
            groups = self.sampler.groups(self.heldout.prompts, 1, self.recipe.validation_sampling, "validation")
        scores = [s.value if s.value is not None else 0.0 for g in groups for s in g.scores]
        write_jsonl(self.folder / "rollouts" / f"validation_{self.step:06d}.jsonl", rollout_rows(groups, self.step))
        return {
            "validation_accuracy": sum(s >= 1.0 for s in scores) / len(scores),
            "validation_reward": sum(scores) / len(scores),
        }

    def validate_at_start(self) -> None:
        if self.step == 0 and self.heldout is not None:
            metrics = self.validate()
            self.summary["heldout_accuracy_before"] = metrics["validation_accuracy"]
            self.log.add(0, metrics)
            console.print(f"before training: held-out accuracy {metrics['validation_accuracy']:.3f}")
        span.take_step()

    def finish_step(self, metrics: dict[str, float], sampled: list[Group]) -> None:
        """Dump, validate, save and report one step."""
        recipe = self.recipe
        write_jsonl(self.folder / "rollouts" / f"step_{self.step:06d}.jsonl", rollout_rows(sampled, self.step))
        self._report_failures(sampled)
        if recipe.run.validate_every and self.step % recipe.run.validate_every == 0 and self.step < recipe.run.steps:
            metrics |= self.validate()
        if recipe.run.save_every and self.step % recipe.run.save_every == 0:
            self.save()
        spans = span.take_step()
        self.log.add(
            self.step, {**metrics, **self.refit_metrics, "weight_version": self.version, **{f"seconds/{k}": v for k, v in spans.items()}}
        )
        line = progress_line(self.step, recipe.run.steps, metrics, spans)
        if "validation_accuracy" in metrics:
            line += f" | held-out {metrics['validation_accuracy']:.3f}"
        console.print(line)

    def _report_failures(self, sampled: list[Group]) -> None:
        failures = [s.failure for g in sampled for s in g.scores if s.failure]
        self.summary["reward_failures"] += len(failures)
        if failures:
            console.print(f"reward function failed on {len(failures)} samples, which are left out; the first: {failures[0]}")

    def finish(self) -> dict[str, Any]:
        """Last validation, checkpoint, summary and plot."""
        metrics = {} if self.interrupted else self.validate()
        if metrics:
            self.summary["heldout_accuracy_after"] = metrics["validation_accuracy"]
            self.log.add(self.step, metrics)
        self.save()
        if not self.interrupted and self.recipe.run.save_hf:
            self._save_hf()
        self.summary |= {
            "name": self.recipe.name,
            "steps": self.step,
            "interrupted": self.interrupted,
            "weight_version": self.version,
            "prompts_dropped": self.dropped,
            "seconds": round(self.summary["seconds"] + time.perf_counter() - self.started, 1),
            "engines": self.pool.stats(),
            "engines_lost": self.pool.lost,
            "requests_reissued": self.pool.reissued,
            "seconds_by_phase": {name: round(s, 2) for name, s in span.total.items()},
            "checkpoint": str(self._checkpoint_path(self.step)),
        }
        (self.folder / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        plot_progress(read_jsonl(self.log.path), self.folder / "progress.png")
        return self.summary

    def _save_hf(self) -> None:
        """The trained model as a Hugging Face folder, for any tool that reads one."""
        target, source = self.folder / "model", Path(self.recipe.model.path)
        with span("save"):
            self.trainer.export_hf(str(target.resolve()))
            for file in (*source.glob("*.json"), *source.glob("*.jinja"), *source.glob("*.txt")):
                if not file.name.startswith("model.safetensors"):
                    shutil.copy(file, target)
        self.summary["model"] = str(target)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _checkpoint_path(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def save(self) -> None:
        """A checkpoint of this step. It appears under its name only when it is complete."""
        final = self._checkpoint_path(self.step)
        if final.exists():
            return
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with span("save"):
            (partial / "trainer").mkdir(parents=True)
            self.trainer.save(str((partial / "trainer").resolve()))
            state = {
                "step": self.step,
                "version": self.version,
                "arch": self.arch.fingerprint,
                "layout": vars(self.recipe.trainer.parallel.layout()),
                "prompts": self.prompts.state(),
                "input_scales": self.input_scales,
                "summary": self.summary | {"seconds": self.summary["seconds"] + time.perf_counter() - self.started},
            }
            (partial / "state.json").write_text(json.dumps(state, indent=2))
            (partial / "recipe.yaml").write_text(dump_recipe(self.recipe))
            partial.rename(final)
        complete = sorted(p for p in final.parent.glob("step_*") if p.suffix != ".partial")
        for old in complete[: -self.recipe.run.keep_checkpoints]:
            shutil.rmtree(old)

    def _find_checkpoint(self, required: bool) -> Path | None:
        found = sorted(p for p in self.folder.glob("checkpoints/step_*/state.json") if p.parent.suffix != ".partial")
        if not found and not required:
            return None
        if not found:
            raise CheckpointError(f"--resume: {self.folder}/checkpoints holds no complete checkpoint; start without --resume")
        folder = found[-1].parent
        state = json.loads(found[-1].read_text())
        if state["arch"] != self.arch.fingerprint:
            raise CheckpointError(f"{folder} is of another model than model.path = {self.recipe.model.path}; set run.folder or model.path")
        layout = vars(self.recipe.trainer.parallel.layout())
        if state["layout"] != layout:
            changed = ", ".join(f"{k}: {v} then, {layout[k]} now" for k, v in state["layout"].items() if layout[k] != v)
            raise CheckpointError(f"{folder} was saved in another trainer.parallel ({changed}); resume with the same")
        self.saved = state
        return folder

    def _restore(self) -> None:
        if self.checkpoint is None:
            return
        self.trainer.load(str((self.checkpoint / "trainer").resolve()))
        self.step, self.version = self.saved["step"], self.saved["version"] - 1  # the first refit makes it `version` again
        self.prompts.restore(self.saved["prompts"])
        self.input_scales = self.saved.get("input_scales", {})
        self.summary = self.saved["summary"]
        console.print(f"resumed from {self.checkpoint}, step {self.step}, weight version {self.saved['version']}")
