"""Memory: sends later what a lossy pipeline has lost in earlier steps."""
