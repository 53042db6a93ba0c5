"""Plays the episodes of training and evaluation."""
