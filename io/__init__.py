"""How bytes move: streams and events, copiers, direct file I/O, slab and manifest, checksums, fault injection."""
