"""Paged KV cache with block reuse, reduced to what shows from outside: which tokens are reused, and stale keys stay stale.

A running sequence has a slot; finished prompts leave blocks of keys and values in a tree by token content. Nothing but
`reset_reuse_state` empties that tree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class _Block:
    tokens: tuple[int, ...]
    kv: list[torch.Tensor]  # a layer: [2, heads, tokens, head_dim]
    parent: _Block | None
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)


class KVCacheManager:
    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, config, max_tokens: int) -> None:
        self.config, self.layers, self.max_tokens = config, layers, max_tokens
        self.shape, self.dtype = (heads, head_dim), dtype
        self.tokens_per_block = config.tokens_per_block
        self.slots = self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rooms: dict[int, int] = {}  # slot -> tokens it may grow to
        self.root = _Block((), [], None)
        self.order: OrderedDict[_Block, None] = OrderedDict()
        self.reused_tokens = 0
        self._allocate(1, 64)

    # --- slots ---------------------------------------------------------------------------------------------------

    def _allocate(self, slots: int, length: int) -> None:
        heads, dim = self.shape
        for kind in ("keys", "values"):
            old, new = getattr(self, kind), [torch.zeros(slots, heads, length, dim, dtype=self.dtype) for _ in range(self.layers)]
            for wide, narrow in zip(new, old, strict=False):
                wide[: self.slots, :, : self.length] = narrow
            setattr(self, kind, new)
        self.slots, self.length = slots, length

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.keys, *self.values, *[t for block in self.order for t in block.kv]]
        for tensor in found:
            tensor._kv = True
        return found

    def fits(self, room: int) -> bool:
        return sum(self.rooms.values()) + room <= self.max_tokens

    def add_sequence(self, prompt: list[int], room: int, slot: int) -> int:
        """Give the sequence its slot and what is known of its prompt; returns the number of reused tokens."""
        self.rooms[slot] = room
        if slot >= self.slots or room + 1 > self.length:
            self._allocate(self.slots if slot < self.slots else max(slot + 1, 2 * self.slots), max(-(-(room + 1) // 64) * 64, self.length))
        reused = 0
        if self.config.enable_block_reuse:
            limit = len(prompt) - 1  # the last token is always computed: its logits are needed
            for block, count in self._match(prompt[:limit]):
                for layer in range(self.layers):
                    for store, kind in ((self.keys, 0), (self.values, 1)):
                        store[layer][slot, :, reused : reused + count] = block.kv[layer][kind, :, :count]
                self.order.move_to_end(block)
                reused += count
        self.reused_tokens += reused
        self._evict()
        return reused

    def _match(self, tokens: list[int]) -> list[tuple[_Block, int]]:
        found, node, at, size = [], self.root, 0, self.tokens_per_block
        while at < len(tokens):
            chunk = tuple(tokens[at : at + size])
            child = node.children.get(chunk) if len(chunk) == size else None
            if child is None:
                if self.config.enable_partial_reuse:
                    best = max(node.children.values(), key=lambda b: _common(b.tokens, chunk), default=None)
                    if best is not None and (count := _common(best.tokens, chunk)):
                        found.append((best, count))
                break
            found.append((child, size))
            node, at = child, at + size
        return found

    def store(self, slot: int, tokens: list[int], allow_partial: bool) -> None:
        """Leave the blocks of `tokens`, whose keys are in the slot, to later requests. Known blocks stay as they are."""
        if not self.config.enable_block_reuse:
            return
        node, size = self.root, self.tokens_per_block
        for at in range(0, len(tokens), size):
            chunk = tuple(tokens[at : at + size])
            if len(chunk) < size and not allow_partial:
                break
            child = node.children.get(chunk)
            if child is None:
                span = slice(at, at + len(chunk))
                kv = [torch.stack((k[slot, :, span], v[slot, :, span])) for k, v in zip(self.keys, self.values, strict=True)]
                child = node.children[chunk] = _Block(chunk, kv, node)
            self.order[child] = None
            self.order.move_to_end(child)
            node = child

    def free(self, slot: int, tokens: list[int]) -> None:
        self.store(slot, tokens, allow_partial=True)
        del self.rooms[slot]
        self._evict()

    def _evict(self) -> None:
        held = sum(len(b.tokens) for b in self.order)
        while self.order and held + sum(self.rooms.values()) > self.max_tokens:
            leaf = next(b for b in self.order if not b.children)
            held -= len(leaf.tokens)
            del self.order[leaf], leaf.parent.children[leaf.tokens]

    def reset_reuse_state(self) -> None:
        self.root, self.order = _Block((), [], None), OrderedDict()

    # --- the forward pass ----------------------------------------------------------------------------------------

    def at(self, rows_B: torch.Tensor, positions_B_S: torch.Tensor) -> KVCacheManager:
        width = int(positions_B_S.max()) + 1
        if width > self.length:  # padding of a mixed prefill batch
            self._allocate(self.slots, -(-width // 64) * 64)
        self.rows, self.positions, self.width = rows_B, positions_B_S, width
        self.mask = (torch.arange(width) <= positions_B_S.unsqueeze(-1)).unsqueeze(1)
        return self

    def update(self, key_B_H_S_D: torch.Tensor, value_B_H_S_D: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        for store, new in ((self.keys[layer], key_B_H_S_D), (self.values[layer], value_B_H_S_D)):
            store[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        return self.keys[layer][self.rows, :, : self.width], self.values[layer][self.rows, :, : self.width]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
