"""Low-rank compressors see layers as matrices and send their factors."""
