"""Torch twins of the kernels: what runs where there is no GPU. Each has its kernel's arguments and meaning."""
