"""What runs on tensors: paged append, paged attention, offset tables, partial block copy."""
