"""Memory: what a lossy pipeline did not send today is sent tomorrow."""
