"""Measures the step of every choice on the job's own network and processors; needs PyTorch and a launcher."""
