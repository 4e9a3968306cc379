"""Imported first: says which extra to install where TensorFlow or Keras is missing."""

from gradcomp.core.requires import need

need("gradcomp.tf", "tf", "tensorflow", "keras")
