"""The small GPT-OSS model: its corpus, its training, its export to a checkpoint."""
