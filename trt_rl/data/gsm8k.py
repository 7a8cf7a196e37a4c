"""GSM8K (arXiv:2110.14168) as rows, through Hugging Face datasets."""

from __future__ import annotations

from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def rows(split: str, path: str = "openai/gsm8k", instruction: str = INSTRUCTION) -> list[dict[str, Any]]:
    """Rows of `split` (`train` or `test`): `prompt` (chat messages) and `answer`, what follows `####` in the solution.

    `path` is the dataset's name on the hub, or a folder with a copy of it.
    """
    import datasets

    data = datasets.load_dataset(path, "main", split=split)
    return [
        {
            "prompt": [{"role": "user", "content": f"{row['question']}\n{instruction}"}],
            "answer": row["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
        }
        for row in data
    ]
