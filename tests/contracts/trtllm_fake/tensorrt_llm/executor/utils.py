"""`tensorrt_llm.executor.utils`."""


class RequestError(RuntimeError):
    """The error raised when a request fails."""
