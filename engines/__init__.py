"""Back end: profiles, the build, and the engine store.

A serving host imports `engines.store` and `engines.sessions` only; everything else needs the exporter.
"""
