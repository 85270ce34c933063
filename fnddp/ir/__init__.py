"""What plans are made of."""
