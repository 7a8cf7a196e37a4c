"""Make the quickstart's model: a small Qwen3 that learned arithmetic from sloppy demonstrations.

    python examples/quickstart/make_model.py --out examples/quickstart/model      # about 15 minutes on 2 cores

Most of the demonstrations it was taught with make the classic mistakes (a dropped carry; the smaller digit
taken from the larger one in every column), the rest are right. So it knows how to add and subtract but usually
does not: reinforcement learning has something to find.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import tokenizers
import torch
import transformers

QUESTION = "State the final answer to the following arithmetic problem: {} ="  # reasoning-gym's chain_sum
SLOPPY = 0.7  # share of demonstrations with mistakes
END = "<|im_end|>"


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own and the question's words merge into one."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    split_digits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d| [+-]| ="), behavior="isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split_digits, as_bytes])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", END],
        show_progress=False,
    )
    rng = random.Random(0)
    model.train_from_iterator([QUESTION.format(expression(rng)[0]) for _ in range(500)], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END, pad_token="<|pad|>")


def expression(rng: random.Random) -> tuple[str, int, int, str]:
    """Two operands of two digits, as chain_sum draws them."""
    a, b, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-")
    return f"{a} {sign} {b}", a, b, sign


def right(a: int, b: int, sign: str) -> int:
    return a + b if sign == "+" else a - b


def sloppy(a: int, b: int, sign: str) -> int:
    """Column by column, carries and borrows forgotten."""
    columns = [((a // 10) % 10, (b // 10) % 10), (a % 10, b % 10)]
    digits = [(x + y) % 10 if sign == "+" else abs(x - y) for x, y in columns]
    value = digits[0] * 10 + digits[1]
    return -value if sign == "-" and a < b else value


def demonstrations(rng: random.Random, tokenizer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[count, S]` and labels, which cover the answer and the end token only."""
    rows, labels = [], []
    for _ in range(count):
        text, a, b, sign = expression(rng)
        answer = (sloppy if rng.random() < SLOPPY else right)(a, b, sign)
        prompt = tokenizer.encode(QUESTION.format(text))
        response = [*tokenizer.encode(str(answer)), tokenizer.eos_token_id]
        rows.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([r + [pad] * (width - len(r)) for r in rows]),
        torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps, pct_start=0.05)
    for step in range(args.steps):
        tokens, labels = demonstrations(rng, tokenizer, 512)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
