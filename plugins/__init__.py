"""What every layer may import: the model's dimensions and the op registry defined over them."""
