"""What only a small policy needs that starts from nothing, as the quickstart's does."""
