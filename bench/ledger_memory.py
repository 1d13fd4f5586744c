"""Resident memory per cached block: a process of its own fills one pool and says by how much it grew.

``python -m kvtier.bench.ledger_memory BLOCKS kvtier|vllm`` prints bytes per cached block; BLOCKS is a multiple of a prompt's
256. Counted are handles, tree or hash map, what content is recognised by (the tokens themselves in kvtier), and whatever else
grows with the pool. There are no keys and values.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvtier.bench.ledger_plan import VLLM
from kvtier.bench.ledger_rig import TOKENS_PER_BLOCK, Prompts, new_ledger, num_cached, store
from kvtier.errors import KVTierError
from kvtier.tiering.ledger.request import Request

PROMPT_BLOCKS: Final = 256
LOWER_BLOCKS: Final = 1024
_PATIENCE: Final = 1200.0


def bytes_per_block(num_blocks: int, who: str) -> float:
    """Run the measurement in a fresh process and return what it says.

    Raises:
        KVTierError: the process failed.
    """
    command = [sys.executable, "-m", "kvtier.bench.ledger_memory", str(num_blocks), who]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if found.returncode or not found.stdout.strip():
        raise KVTierError(f"{' '.join(command[1:])} ended with {found.returncode}: {found.stderr.strip()[-400:] or 'no word'}")
    return float(found.stdout.split()[-1])


def resident_bytes() -> int:
    """What this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_by(num_blocks: int, who: str) -> int:
    """Fill a pool of ``num_blocks`` with prompts and return the growth of this process in bytes.

    Raises:
        KVTierError: the pool does not hold what was stored.
    """
    fill = _fill_vllm if who == VLLM else _fill
    fill(PROMPT_BLOCKS)  # what is loaded and made once is not counted
    before = _settled()
    cached, _held = fill(num_blocks)
    grown = _settled() - before
    if cached != num_blocks:
        raise KVTierError(f"{who}: {cached} blocks are cached, expected {num_blocks}")
    return grown


def _fill(num_blocks: int) -> tuple[int, object]:
    """Blocks cached, and the ledger, which is held on to while memory is read."""
    ledger = new_ledger(num_blocks, LOWER_BLOCKS, LOWER_BLOCKS, offload=False)
    prompts = Prompts(7)
    for number in range(num_blocks // PROMPT_BLOCKS):
        store(ledger, Request(number, prompts.new(PROMPT_BLOCKS * TOKENS_PER_BLOCK)))
        ledger.events.flush()
    return num_cached(ledger), ledger


def _fill_vllm(num_blocks: int) -> tuple[int, object]:
    from kvtier.bench import ledger_vllm
    num_tokens = PROMPT_BLOCKS * TOKENS_PER_BLOCK
    manager = ledger_vllm.new_manager(num_blocks, num_tokens + 1)
    prompts = Prompts(7)
    for number in range(num_blocks // PROMPT_BLOCKS):
        ledger_vllm.store(manager, ledger_vllm.new_request(number, prompts.new(num_tokens).tolist()))
    return len(manager.block_pool.cached_block_hash_to_block), manager


def _settled() -> int:
    gc.collect()
    return resident_bytes()


if __name__ == "__main__":
    try:
        print(grown_by(int(sys.argv[1]), sys.argv[2]) / int(sys.argv[1]))
    except KVTierError as error:
        sys.exit(str(error))
