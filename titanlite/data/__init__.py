"""From text to batches. Reading order: sources, tokenizer, shards, prepare, order, batches; the last needs torch."""
