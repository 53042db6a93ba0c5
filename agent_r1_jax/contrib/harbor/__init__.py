"""Task directories in Harbor's layout, played without a container."""
