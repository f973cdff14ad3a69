"""What is not about RLHF, once for all scripts: the run, the models, the data."""
