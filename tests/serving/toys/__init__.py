"""Models that cost nothing to run: the shape of the real repository, for tests of what surrounds the models."""
