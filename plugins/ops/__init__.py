"""One file an op; `plugins.registry` lists them."""
