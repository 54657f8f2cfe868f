"""What of a model each rank holds, and files of ranks."""
