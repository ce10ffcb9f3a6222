"""One version directory: claimed, written, published, verified, compared, fetched, adopted."""
