"""Tests of reference media. `clips` and `heif` make files, `hostile` the ones that must be refused."""
