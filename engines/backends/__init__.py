"""Builders: an emitted graph to an engine file. They need the exporter; a serving host imports `engines.sessions`."""
