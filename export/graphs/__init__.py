"""The graphs of the model, one file each; `export.graphs.graph` holds the declaration they share."""
