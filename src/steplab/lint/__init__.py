"""Lines of a model that a GPU, a compiler or a CUDA graph stumbles over."""
