"""Who owns what and when it moves: ledger, manager, transfers, configuration, engine adapters."""
