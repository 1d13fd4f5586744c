"""A file that is handed over, of three groups of which one is empty, and what tests do with it."""

from __future__ import annotations

import os

import numpy as np

from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceReader, PieceShape, PieceWriter

SHAPE = PieceShape((64, 0, 100), (5, 3, 2))
KEYS = [bytes([number]) * 32 for number in range(5)]
LIFETIME = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def content(group: int) -> np.ndarray:
    return np.random.default_rng(group).integers(0, 256, (SHAPE.num_blocks[group], SHAPE.block_bytes[group]), dtype=np.uint8)


def write(folder: HandoverFolder, writer: PieceWriter) -> bytes:
    for group in (0, 2):
        count = SHAPE.num_blocks[group]
        writer.write(group, 0, content(group), KEYS[:count], range(count))
    return writer.finish(folder.now() + LIFETIME)


def hand_over(folder: HandoverFolder) -> tuple[str, bytes]:
    with PieceWriter(folder, SHAPE) as writer:
        digest = write(folder, writer)
        return writer.name, digest


def reader(folder: HandoverFolder, name: str, digest: bytes, rank: int = 0, num_ranks: int = 1, readers: range = range(1)) -> PieceReader:
    return PieceReader(folder, name, SHAPE, digest, rank, num_ranks, readers)


def files(folder: HandoverFolder) -> list[str]:
    return sorted(os.listdir(folder.directory))


def flip(folder: HandoverFolder, name: str, place: int, bit: int) -> None:
    with (folder.directory / name).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
