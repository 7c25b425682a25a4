"""Turn texts into batches. Reading order: sources, tokenizer, shards, prepare, inputs, order, batches (uses torch)."""
