"""Errors a user can act on. Each message names what was given, what is allowed and what would work."""


class TrtRlError(Exception):
    """Base of every error that the command line prints without a traceback."""


class RecipeError(TrtRlError):
    """The recipe cannot run as written; the message lists every violation found."""


class ModelError(TrtRlError):
    """A Hugging Face model folder is missing, damaged or of an unsupported kind."""


class DataError(TrtRlError):
    """A data set is empty, unreadable or lacks a required column."""


class RefitError(TrtRlError):
    """A weight transfer was refused or failed; nothing of it may be served."""


class CheckpointError(TrtRlError):
    """A checkpoint is missing, damaged or belongs to another model or layout."""


class WorkerDied(TrtRlError):
    """A process of the run ended before its work was done."""


class WorkerSilent(WorkerDied):
    """A process of the run did not answer in time. Refits count it among the dead; it may hold what it had."""


class WorkerFailed(TrtRlError):
    """A process of the run raised something that no one foresaw; the message holds its traceback."""


class EngineError(TrtRlError):
    """A rollout engine cannot serve the request it was given."""


class EngineLost(EngineError):
    """A rollout engine, or one of its workers, has ended; its requests can be served elsewhere."""
