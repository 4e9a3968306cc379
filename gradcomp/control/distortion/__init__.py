"""What a layer loses under a compressor: measured for controllers, apart from training."""
