"""Predicts what compression would gain, from the shapes of a model and the rate of a network."""
