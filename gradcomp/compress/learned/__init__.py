"""Learned compressors: a small network, trained beside the model, codes what is sent."""
