"""Builders: (graph, profile) to an engine file. Needs the exporter; a serving host imports `engines.sessions` instead."""
