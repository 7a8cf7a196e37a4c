"""`tensorrt_llm.logger`: the one logger object."""

from __future__ import annotations

import logging
import os


class Logger:
    def __init__(self) -> None:
        self._log = logging.getLogger("TRT-LLM")
        self._log.setLevel(os.environ.get("TLLM_LOG_LEVEL", "WARNING").upper())
        self.rank: int | None = None

    def set_level(self, level: str) -> None:
        self._log.setLevel(level.upper())

    def set_rank(self, rank: int) -> None:
        self.rank = rank

    def debug(self, *message) -> None:
        self._log.debug(*message)

    def info(self, *message) -> None:
        self._log.info(*message)

    def warning(self, *message) -> None:
        self._log.warning(*message)

    def error(self, *message) -> None:
        self._log.error(*message)


logger = Logger()
