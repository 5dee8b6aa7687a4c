"""Back end: profiles, the build, and the engine store.

A serving host imports `engines.store`, `engines.sessions` and what they stand on (`profile`, `machine`); everything
else needs the exporter.
"""
