"""Rows in, tokenized prompts out, in an order that a resumed run continues."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_rl.config import DataSettings, Source
from trt_rl.dotted import load_function
from trt_rl.errors import DataError


@dataclass(frozen=True)
class Prompt:
    index: int  # of the row in its source
    tokens: tuple[int, ...]
    row: dict[str, Any]


def read_rows(source: Source, key: str) -> list[dict[str, Any]]:
    """All rows of a file or of a function's result.

    Raises:
        DataError: the source is missing, unreadable or empty.
    """
    path = Path(source.source)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise DataError(f"{key}.source: {path} does not exist")
        import datasets

        kind = "parquet" if path.suffix == ".parquet" else "json"
        try:
            rows = list(datasets.load_dataset(kind, data_files=str(path), split="train")) if path.stat().st_size else []
        except datasets.exceptions.DatasetGenerationError as error:
            raise DataError(f"{key}.source: {path} is not readable as {kind}: {error.__cause__ or error}") from error
    else:
        function = load_function(source.source, f"{key}.source")
        try:
            inspect.signature(function).bind(**source.args)
        except TypeError as error:
            raise DataError(f"{key}.args do not fit {source.source}{inspect.signature(function)}: {error}") from error
        try:
            rows = list(function(**source.args))
        except Exception as error:
            # User code: whatever it raises is about this source, and the cause stays attached.
            raise DataError(f"{key}.source: {source.source} raised {type(error).__name__}: {error}") from error
    if not rows:
        raise DataError(f"{key}.source: {source.source} has no rows")
    return rows


class PromptSet:
    """Tokenized prompts of one source. `dropped` counts those longer than the limit."""

    def __init__(self, rows: Iterable[dict[str, Any]], tokenizer: Any, settings: DataSettings, key: str) -> None:
        self.prompts: list[Prompt] = []
        self.dropped = 0
        for index, row in enumerate(rows):
            if row.get(settings.prompt_key) in (None, "", []):
                raise DataError(f"{key}: row {index} has no {settings.prompt_key!r} (data.prompt_key); its columns: {sorted(row)}")
            try:
                tokens = encode(tokenizer, row[settings.prompt_key])
            except (TypeError, ValueError) as error:
                raise DataError(f"{key}: row {index}: the prompt cannot be tokenized: {error}") from error
            if len(tokens) > settings.max_prompt_tokens:
                self.dropped += 1
            else:
                self.prompts.append(Prompt(index, tuple(tokens), row))
        if not self.prompts:
            raise DataError(f"{key}: all {self.dropped} prompts are longer than data.max_prompt_tokens = {settings.max_prompt_tokens}")

    def __len__(self) -> int:
        return len(self.prompts)


def encode(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a plain string, or of chat messages through the tokenizer's template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list):
        raise TypeError(f"it is {type(prompt).__name__}, neither a string nor a list of chat messages")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)


class PromptStream:
    """Endless prompts: every epoch is one pass in an order given by seed and epoch alone."""

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool) -> None:
        self.prompts, self.seed, self.shuffle = prompts.prompts, seed, shuffle
        self.epoch = self.cursor = 0
        self._order = self._epoch_order()

    def take(self, count: int) -> list[Prompt]:
        taken = []
        while len(taken) < count:
            if self.cursor == len(self.prompts):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken.append(self.prompts[self._order[self.cursor]])
            self.cursor += 1
        return taken

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cursor": self.cursor, "prompts": len(self.prompts)}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the data set has another size than then.
        """
        if state["prompts"] != len(self.prompts):
            raise DataError(f"data.train has {len(self.prompts)} usable prompts, the checkpoint was made with {state['prompts']}")
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order
