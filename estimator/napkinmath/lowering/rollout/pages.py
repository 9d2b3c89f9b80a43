"""The pages of an engine's cache: how many there are in some bytes, and how many a sequence takes.

Layers that cache alike share a table of pages; where kinds of layers mix, they are cut into groups of
equally many layers, and a page of one group is as large as one of any other. Source: vllm 0.11
v1/core/kv_cache_utils.py get_num_blocks, _get_kv_cache_groups_uniform_page_size,
v1/kv_cache_interface.py max_memory_usage_bytes, platforms/interface.py update_block_size_for_backend.
"""

from __future__ import annotations

from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.rollout.served import ServedModel


class PageGroup(Record):
    """Layers that share a table of pages; `window` of 0 sees all, `is_state` keeps one page
    whatever the length."""

    window: int
    is_state: bool
    tables: int
    """Tables of pages: the kind's layers over the layers of a group."""


class Pages(Record):
    """The pages of one rank's cache."""

    block_tokens: int
    """Tokens of a page."""
    block_bytes: int
    """Of a page in all layers of a group."""
    groups: tuple[PageGroup, ...]

    def number(self, nbytes: int) -> int:
        """Pages in so many bytes."""
        return max(0, nbytes) // self.block_bytes if self.block_bytes else 0

    def of_sequence(self, tokens: int, chunk: int = 0) -> int:
        """Pages of one sequence of `tokens` tokens. A window keeps its own tokens and those of the
        `chunk` that is read, and may begin within a page."""
        total = 0
        for group in self.groups:
            if group.is_state:
                total += group.tables
                continue
            kept = min(tokens, group.window - 1 + max(chunk, 1)) if group.window else tokens
            extra = 1 if group.window else 0
            total += group.tables * (-(-kept // self.block_tokens) + extra)
        return total


def pages_of(model: ServedModel, block_tokens: int) -> Pages:
    """The pages of a model's cache with blocks of so many tokens; layers with states raise the block
    to the size of a state."""
    kinds: dict[tuple[int, bool], tuple[int, int]] = {}
    for layer in model.layers:
        cache = layer.cache
        if cache is None:
            continue
        is_state = not cache.token_bytes
        size = cache.state_bytes if is_state else cache.token_bytes
        key = (cache.window, is_state)
        count, largest = kinds.get(key, (0, 0))
        kinds[key] = count + layer.count, max(largest, size)
    token = max((size for (_, is_state), (_, size) in kinds.items() if not is_state), default=0)
    state = max((size for (_, is_state), (_, size) in kinds.items() if is_state), default=0)
    block = block_tokens
    if token and state:
        block = block_tokens * max(1, -(-state // (block_tokens * token)))
    page = max(block * token, state)
    counts = [count for count, _ in kinds.values()]
    least, most = min(counts), max(counts)
    group = most if most < 1.25 * least else least
    groups = tuple(
        PageGroup(window=window, is_state=is_state, tables=-(-count // group))
        for (window, is_state), (count, _) in kinds.items()
    )
    return Pages(block_tokens=block, block_bytes=page * group, groups=groups)
