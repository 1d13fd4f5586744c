"""Pure decisions: eviction queues and retention. No torch, no I/O."""
