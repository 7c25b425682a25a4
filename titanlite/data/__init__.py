"""From text to batches. Reading order: sources, tokenizer, shards, prepare, order, batches. Only the last needs torch."""
