"""Capture a call once as a CUDA graph, replay it ever after."""
