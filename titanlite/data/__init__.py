"""From text to batches. Reading order: sources, tokenizer, shards, prepare, inputs, order, batches, with torch."""
