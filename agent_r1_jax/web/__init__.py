"""Common parts of this package's HTTP servers and clients."""
