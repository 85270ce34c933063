"""The data types that plans consist of."""
