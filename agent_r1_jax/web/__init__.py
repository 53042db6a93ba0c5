"""Parts of all servers and clients here that speak HTTP."""
