"""One file a component: its configuration in both layouts, the tensors it must have, and native names for them."""
