"""What values (`Norm`, `KVCache`, ...) share: what they were made of, scales, kept constants."""
