"""A refit as the driver sees it: one version moves from all trainer ranks into every engine that can take it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trt_rl.errors import EngineLost, RefitError, TrtRlError, WorkerDied
from trt_rl.processes import settle
from trt_rl.refit.member import Agreement
from trt_rl.refit.stream import Refit, Verify

_GRACE_S = 15.0  # a member's own timeout speaks first: it knows whom it waited for

Failures = dict[int, TrtRlError]  # by engine
_ENDED = (WorkerDied, EngineLost)


class Party(Protocol):
    """What this module needs of the trainer group and of the rollout pool: start a step on some members, do not wait."""

    def begin_refit(self, step: str, *args: Any, only: list[int] | None = None) -> list[Any]: ...


@dataclass
class Outcome:
    """One refit."""

    version: int
    serving: list[int]
    """Engines that committed."""
    failed: dict[int, str] = field(default_factory=dict)
    """Engines that did not, and why. They serve nothing until a later refit commits there."""
    bytes: int = 0
    """Payload sent by all trainer ranks."""
    saved_bytes: int = 0
    verified: int = 0
    """Slices compared bit for bit, over all engines."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, of the slowest member in each."""


class RefitSession:
    """Links trainer ranks with engines and moves versions between them.

    An engine that has ended is not asked again. A version goes in three steps, and each ends before the next begins: *prepare* (weights checked, buffers reserved;
    a refusal leaves all engines as they were), *move* (buckets, verified where they land), *commit*. An engine that
    fails is left behind, poisoned; the others commit. It is invited again to the next refit, which is then a full one.
    """

    def __init__(self, agreement: Agreement, trainer: Party, pool: Party, table_digests: dict[str, str], verify: Verify) -> None:
        """
        Args:
            agreement: its `engine.replicas` counts all engines.
            table_digests: of every party's own precision table, by the party's name.

        Raises:
            RefitError: the parties disagree about which tensors are FP8.
        """
        if len(set(table_digests.values())) > 1:
            told = ", ".join(f"{name} {digest}" for name, digest in table_digests.items())
            raise RefitError(f"trainer and engine disagree about which tensors are FP8; table digests: {told}")
        self.agreement, self.trainer, self.pool, self.verify = agreement, trainer, pool, verify
        self.trainers = [f"trainer rank {i}" for i in range(agreement.trainer.world)]
        self.engines = list(range(agreement.engine.replicas))
        self.connected: list[int] | None = None
        self.generation = 0
        self.whole = True  # the next refit sends everything

    def run(self, version: int) -> Outcome:
        """Move the trainer's weights into every engine as `version`.

        Raises:
            RefitError: the trainer's weights were refused, or no engine took them.
            WorkerDied: a trainer rank ended.
        """
        outcome, failed, waiting = Outcome(version, []), {}, list(self.engines)
        while waiting:
            invited, refused = waiting, self._ready(version, waiting)
            if refused:
                failed |= refused
                waiting = [i for i in invited if i not in refused]
                self._disconnect(invited)
                continue
            refit = Refit(version, self.verify, full=self.whole)
            sent, broken, received = self._step("send", [refit], [refit], invited, engine_step="receive")
            self._add(outcome, sent, received)
            if lost := [r for r in sent if isinstance(r, TrtRlError)]:
                self._disconnect(invited)
                raise lost[0]
            took = [i for i in invited if i not in broken]
            commits = self._settle(self.pool.begin_refit("commit", version, only=took), [f"engine {i}" for i in took])
            broken |= {i: r for i, r in zip(took, commits, strict=True) if isinstance(r, TrtRlError)}
            outcome.serving += [i for i in took if i not in broken]
            failed |= broken
            died = [i for i in broken if isinstance(broken[i], _ENDED)]
            # Who stood behind a dead engine in a chain did nothing wrong, and is asked again without it.
            waiting = [i for i in broken if i not in died] if died else []
            self.whole = bool(failed)
            if broken:
                self._disconnect(invited)
        outcome.failed = {i: str(error) for i, error in failed.items() if i not in outcome.serving}
        self.engines = [i for i in self.engines if not isinstance(failed.get(i), _ENDED)]  # the dead are not asked again
        if not outcome.serving:
            raise RefitError(f"no engine could take version {version}: " + ("; ".join(outcome.failed.values()) or "all of them have ended"))
        return outcome

    def _ready(self, version: int, invited: list[int]) -> Failures:
        """Connect if the group has changed, check the weights, reserve buffers; returns the engines that cannot."""
        refused = {} if invited == self.connected else self._connect(invited)
        if not refused:
            self._raise_first(self._settle(self.trainer.begin_refit("check"), self.trainers))
            refused = self._step("prepare", [], [version], invited)[1]
        return refused

    def _connect(self, invited: list[int]) -> Failures:
        """Join trainer ranks and `invited` engines in a group of their own; returns the engines that could not."""
        self.generation, self.whole = self.generation + 1, True
        base, tp = self.agreement, self.agreement.engine.tp
        ranks = [(i, r) for i in invited for r in range(tp)]
        labels = tuple(self.trainers) + tuple(f"engine {i}" + (f" rank {r}" if tp > 1 else "") for i, r in ranks)
        meeting = replace(base.meeting, members=len(labels), generation=self.generation, labels=labels)
        placement = base.placement and replace(base.placement, engine=tuple(base.placement.engine[i * tp + r] for i, r in ranks))
        agreed = replace(base, engine=replace(base.engine, replicas=len(invited)), meeting=meeting, placement=placement)
        refs = [self.pool.begin_refit("agree", agreed, at, only=[i])[0] for at, i in enumerate(invited)]
        names = [f"engine {i}" for i in invited]
        answers = self._settle(refs + self.trainer.begin_refit("agree", agreed), names + self.trainers)
        self._raise_first(answers[len(invited) :])
        failed = {i: r for i, r in zip(invited, answers, strict=False) if isinstance(r, TrtRlError)}
        if not failed:
            digests = [(name, d) for name, ds in zip(names + self.trainers, answers, strict=True) for d in ds]
            if len({d for _, d in digests}) > 1:
                raise RefitError("the parties computed different routes: " + ", ".join(f"{n} {d}" for n, d in digests))
            failed = self._step("join", [], [], invited)[1]
        if not failed:
            self.connected = invited
        return failed

    def _disconnect(self, invited: list[int]) -> None:
        names = self.trainers + [f"engine {i}" for i in invited]
        self._settle(self.trainer.begin_refit("disconnect") + self.pool.begin_refit("disconnect", only=invited), names)
        self.connected = None

    def _step(self, step: str, trainer_args: list, engine_args: list, invited: list[int], engine_step: str = "") -> tuple:
        """Run one step on all; returns trainer results, engines that failed with reasons, results of those that did not."""
        engines = self.pool.begin_refit(engine_step or step, *engine_args, only=invited)
        mine = self.trainer.begin_refit(step, *trainer_args)
        names = [f"engine {i}" for i in invited] + self.trainers
        results = self._settle(engines + mine, names)
        theirs, mine = results[: len(invited)], results[len(invited) :]
        failed = {i: r for i, r in zip(invited, theirs, strict=True) if isinstance(r, TrtRlError)}
        if step != "send" and not failed:  # where an engine failed, the trainer's error is often its echo
            self._raise_first(mine)
        return mine, failed, [r for r in theirs if not isinstance(r, TrtRlError)]

    def _settle(self, refs: list[Any], names: list[str]) -> list[Any]:
        """Answers of all, errors in place of answers. Who does not answer within `refit.timeout_s` counts as dead."""
        return settle(refs, names, self.agreement.meeting.timeout_s + _GRACE_S)

    @staticmethod
    def _raise_first(results: list[Any]) -> None:
        for result in results:
            if isinstance(result, TrtRlError):
                raise result

    @staticmethod
    def _add(outcome: Outcome, sent: list[Any], received: list[list[dict]]) -> None:
        own = [r for r in sent if isinstance(r, dict)]
        workers = [r for reports in received for r in reports]
        outcome.bytes += sum(r["bytes"] for r in own)
        outcome.saved_bytes += sum(r["saved_bytes"] for r in own)
        outcome.verified += sum(r["verified"] for r in workers)
        for side, reports in (("trainer", own), ("engine", workers)):
            for report in reports:
                for phase, seconds in report["seconds"].items():
                    key = f"{side}/{phase}"
                    outcome.seconds[key] = max(seconds, outcome.seconds.get(key, 0.0))
