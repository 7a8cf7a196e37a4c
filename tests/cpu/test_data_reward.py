"""Data sets and reward functions, good and bad."""

from __future__ import annotations

import json
import os
import time

import pytest
import ray
import transformers

from trt_rl.config import DataSettings, RewardSettings, Source
from trt_rl.data.prompts import PromptSet, PromptStream, encode, read_rows
from trt_rl.errors import DataError, RecipeError
from trt_rl.reward.pool import RewardPool, Score

TOKENIZER = "examples/quickstart/model"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def settings(**changes) -> DataSettings:
    return DataSettings(train=Source(source="x:y"), **changes)


def test_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in range(3)))
    assert [r["answer"] for r in read_rows(Source(source=str(path)), "data.train")] == ["0", "1", "2"]
    path.write_text("")
    with pytest.raises(DataError, match=r"data\.train\.source: .*rows\.jsonl has no rows"):
        read_rows(Source(source=str(path)), "data.train")
    path.write_text('{"prompt": "a"}\n{"prompt')
    with pytest.raises(DataError, match="is not readable as json"):
        read_rows(Source(source=str(path)), "data.train")
    with pytest.raises(DataError, match="does not exist"):
        read_rows(Source(source=str(tmp_path / "none.parquet")), "data.train")


def test_functions():
    rows = read_rows(Source(source="trt_rl.data.reasoning:rows", args={"task": "chain_sum", "size": 3, "seed": 4}), "data.train")
    assert len(rows) == 3 and rows[0]["entry"]["question"] == rows[0]["prompt"]
    with pytest.raises(DataError, match=r"data\.train\.args do not fit .*: missing a required argument: 'size'"):
        read_rows(Source(source="trt_rl.data.reasoning:rows", args={"task": "chain_sum"}), "data.train")
    for path, message in (("nocolon", "not of the form"), ("no.such:f", "No module"), ("json:nothing", "no attribute")):
        with pytest.raises(RecipeError, match=message):
            read_rows(Source(source=path), "data.train")


def test_prompts_are_checked_dropped_and_counted(tokenizer):
    rows = [{"prompt": "1 + 1 ="}, {"prompt": "12345678901234567890"}]
    prompts = PromptSet(rows, tokenizer, settings(max_prompt_tokens=10), "data.train")
    assert len(prompts) == 1 and prompts.dropped == 1
    with pytest.raises(DataError, match=r"all 2 prompts are longer than data\.max_prompt_tokens = 1"):
        PromptSet(rows, tokenizer, settings(max_prompt_tokens=1), "data.train")
    with pytest.raises(DataError, match=r"data\.train: row 1 has no 'prompt' .*columns: \['question'\]"):
        PromptSet([rows[0], {"question": "x"}], tokenizer, settings(), "data.train")


def test_chat_messages_go_through_the_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} ={% endif %}"
    assert encode(tokenizer, [{"role": "user", "content": "1 + 1"}]) == tokenizer.encode("1 + 1 =")


def test_the_stream_visits_every_prompt_each_epoch_and_resumes(tokenizer):
    prompts = PromptSet([{"prompt": f"{i} ="} for i in range(10)], tokenizer, settings(), "data.train")
    stream = PromptStream(prompts, seed=3, shuffle=True)
    epochs = [[p.index for p in stream.take(10)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10)) and epochs[0] != epochs[1]
    again = PromptStream(prompts, seed=3, shuffle=True)
    again.take(13)
    state, expected = again.state(), [p.index for p in again.take(20)]
    restored = PromptStream(prompts, seed=3, shuffle=True)
    restored.restore(state)
    assert [p.index for p in restored.take(20)] == expected
    with pytest.raises(DataError, match="the checkpoint was made with 99"):
        restored.restore(state | {"prompts": 99})


# --- rewards: user code may do anything -------------------------------------------------------------------------


def naughty(response: str, row: dict) -> float:
    if response == "raise":
        raise ValueError("no such thing")
    if response == "nan":
        return float("nan")
    if response == "none":
        return None
    if response == "sleep":
        time.sleep(60)
    if response == "swallow":
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001
            return 1.0
    if response == "exit":
        os._exit(3)
    if response == "stuck":  # blocks outside Python's reach: SIGALRM's handler never runs
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
    return float(len(response))


@pytest.fixture(scope="module")
def rewards():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )
    yield RewardPool(RewardSettings(function="tests.cpu.test_data_reward:naughty", workers=2, timeout_s=1.0))
    ray.shutdown()


def test_a_failing_reward_costs_its_sample_only(rewards):
    words = ["a", "raise", "bb", "nan", "none", "sleep", "swallow", "exit", "ccc", "stuck", "dddd"]
    start = time.monotonic()
    scores = dict(zip(words, rewards.score([(w, {}) for w in words]), strict=True))
    assert [scores[w] for w in ("a", "bb", "ccc", "dddd")] == [Score(1.0), Score(2.0), Score(3.0), Score(4.0)]
    expected = {
        "raise": "raised ValueError: no such thing",
        "nan": "returned nan",
        "none": "raised TypeError",
        "sleep": "took longer than reward.timeout_s = 1",
        "swallow": "took longer",
        "exit": "ended or blocked its worker",
        "stuck": "ended or blocked its worker",
    }
    for word, message in expected.items():
        assert scores[word].value is None and message in scores[word].failure, (word, scores[word])
    assert time.monotonic() - start < 120
    assert rewards.score([("a", {})]) == [Score(1.0)], "the pool works on afterwards"


def test_a_wrong_reward_path_is_an_error_at_once(rewards):
    with pytest.raises(RecipeError, match=r"reward\.function = 'trt_rl\.reward\.reasoning:scor' cannot be loaded"):
        RewardPool(RewardSettings(function="trt_rl.reward.reasoning:scor"))


def test_shipped_rewards():
    from trt_rl.data.reasoning import rows
    from trt_rl.reward import math, reasoning

    row = rows("chain_sum", 1, 7)[0]
    assert reasoning.score(f" {row['answer']}\n", row) == 1.0
    assert reasoning.score("nonsense", row) < 1.0
    assert math.score("so it is \\boxed{\\frac{1}{2}}", {"answer": "0.5"}) == 1.0
    assert math.score("I do not know", {"answer": "3"}) == 0.0


def test_gsm8k_rows(tmp_path):
    """From a folder laid out as the dataset is on the hub."""
    from trt_rl.data.gsm8k import INSTRUCTION, rows
    from trt_rl.reward import math

    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n  - {split: test, path: main/test.jsonl}\n---\n"
    )
    (tmp_path / "main").mkdir()
    row = {"question": "How many?", "answer": "First <<2*600=1200>>1200, then one more.\n#### 1,201"}
    (tmp_path / "main/train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "main/test.jsonl").write_text(json.dumps(row | {"question": "And here?"}) + "\n")
    (train,), (test,) = rows("train", str(tmp_path)), rows("test", str(tmp_path))
    assert train == {"prompt": [{"role": "user", "content": f"How many?\n{INSTRUCTION}"}], "answer": "1201"}
    assert test["prompt"][0]["content"].startswith("And here?")
    assert math.score("It is \\boxed{1201}.", train) == 1.0 and math.score("It is \\boxed{1200}.", train) == 0.0


def test_answers_in_nested_columns():
    from trt_rl.reward import math

    row = {"reward_model": {"ground_truth": "34", "style": "rule"}}
    assert math.score("Answer: \\boxed{34}", row, answer_key="reward_model.ground_truth") == 1.0
    assert math.score("Answer: \\boxed{43}", row, answer_key="reward_model.ground_truth") == 0.0
