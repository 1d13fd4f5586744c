"""The pure part: keys, blocks, reuse tree, sequences, numbered Moves. No torch, file, thread or lock in here."""
