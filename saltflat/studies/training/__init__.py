"""Train networks: one at a time, or batched with vmap."""
