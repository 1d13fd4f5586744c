"""Where bytes live: layouts, pool indices, primary, host and NVMe geometry, sizing."""
